"""Sampling of translations from the model's distribution.

Shapes: B sentences, S source positions, V target vocabulary, D draws per sentence, R growing rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from econmt.data.text.vocabulary import BOS, EOS
from econmt.decoding.search.adjustments import Adjustments
from econmt.decoding.search.beam import Ended, Grown, Hypothesis, SearchOptions, Trace, rule_out
from econmt.decoding.search.fusion import ShallowFusion
from econmt.decoding.search.model import SearchModel


def uniform_numbers(seed: int, sentence: int, draws: int, positions: int) -> Tensor:
    """Draws random numbers (positions, draws) in [0, 1), float64, which depend on the arguments only.

    A counter-based generator keyed by seed and sentence gives a sentence the same numbers in every batch. They are
    multiples of 2^-24, so that the product with a sum in float64 is less than the sum.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, sentence]))
    return torch.from_numpy(generator.random((positions, draws), dtype=np.float32)).double()


def draw(log_probs: Tensor, uniform: Tensor, top: int, temperature: float, share: float = 1.0) -> Tensor:
    """Draws one token per row, (R,) int64, by inverting the cumulative distribution.

    ``log_probs`` (R, V) are -inf if ruled out and are divided by ``temperature``; ``uniform`` (R,) float64 are random
    numbers in [0, 1). The ``top`` most probable tokens are drawn from, or all if it is 0, and of these the fewest most
    probable ones whose probabilities reach the ``share`` of their sum.
    """
    tokens: Tensor | None = None
    if 0 < top < log_probs.shape[1]:
        log_probs, tokens = log_probs.topk(top, dim=1)
    if share < 1.0:
        log_probs, order = log_probs.sort(dim=1, descending=True, stable=True)
        tokens = order if tokens is None else tokens.gather(1, order)
    probabilities = torch.softmax(log_probs.double() / temperature, dim=1)
    cumulative = probabilities.cumsum(dim=1)
    if share < 1.0:
        cumulative = probabilities.masked_fill(cumulative - probabilities >= share, 0.0).cumsum(dim=1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    # The first entry above the threshold has a positive probability, so it is never ruled out.
    chosen = torch.searchsorted(cumulative, threshold, right=True)
    return (chosen if tokens is None else tokens.gather(1, chosen))[:, 0]


@torch.inference_mode()
def sample(
    model: SearchModel,
    source: Tensor,
    lengths: Tensor,
    limits: Tensor,
    options: SearchOptions,
    numbers: Sequence[int],
    fusion: ShallowFusion | None = None,
) -> list[list[Hypothesis]]:
    """Draws ``options.nbest_size`` independent translations of each sentence.

    Tokens and scores follow the rules of :func:`~econmt.decoding.search.beam.beam_search`: no PAD or BOS, EOS after
    ``limits`` tokens, and log-probabilities of the model, independent of temperature and ``options.sample``; unlike
    there, scores are independent of :mod:`~econmt.decoding.search.adjustments`, too, which change the draws alone.

    Args:
        model, source, lengths, limits, options, fusion: see :func:`~econmt.decoding.search.beam.beam_search`.
        numbers: number of each sentence; together with ``options.seed`` it determines the draws.

    Returns:
        The translations of each sentence, highest score first.
    """
    assert options.sample is not None
    device, draws = source.device, options.nbest_size
    limits = limits.clamp(min=options.min_output_length)
    limits_here, shortest, longest = limits.to(device), int(limits.min()), int(limits.max())
    uniform = torch.stack(
        [uniform_numbers(options.seed, number, draws, longest + 1) for number in numbers], dim=1
    )
    uniform = uniform.view(longest + 1, -1).to(device)
    sentences = torch.arange(len(source), device=device).repeat_interleave(draws)
    columns = torch.arange(len(sentences), device=device)
    state = model.encode(source, lengths).select(sentences, columns, draws)
    tokens = torch.full_like(sentences, BOS)
    totals = torch.zeros(len(sentences), dtype=torch.float64, device=device)
    trace, position = Trace(), 0
    adjustments = Adjustments(options, len(sentences), fusion)
    while len(sentences):
        position += 1
        log_probs, attention, state = model.step(tokens, state)
        rule_out(log_probs, limits_here[sentences] if position > shortest else None, position)
        if options.attention:
            trace.attention.append(attention)
        real = log_probs.clone() if options.adjusts else log_probs
        adjustments.apply(log_probs, position)
        numbers_now = uniform[position - 1, columns]
        tokens = draw(log_probs, numbers_now, options.sample, options.temperature, options.top_p)
        totals = totals + real.gather(1, tokens[:, None])[:, 0]
        ends = tokens == EOS
        rows = ends.nonzero()[:, 0]
        trace.ended.append(Ended(position, sentences[rows], rows, totals[rows]))
        growing = (~ends).nonzero()[:, 0]
        trace.grown.append(Grown(tokens[growing], growing))
        adjustments.grow(growing.cpu(), tokens[growing].cpu())
        if len(growing) < len(tokens):
            sentences, columns, tokens, totals = (
                part[growing] for part in (sentences, columns, tokens, totals)
            )
            state = state.select(growing, columns, draws)
    return trace.hypotheses(lengths.cpu(), limits.cpu(), options)
