"""Beam search with the hypotheses, stopping criterion and scores of econmt's own search.

B sentences, K hypotheses of each, R rows that are still growing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt_runtime import library
from econmt_runtime.library import Ids
from econmt_runtime.model import RuntimeModel
from econmt_runtime.text import BOS, EOS, PAD

_Totals = npt.NDArray[np.float64]
_Ended = tuple[float, float, int, int]
"""Score, log-probability, position and row of an ended hypothesis."""

_EXTRA = 10
"""Number of tokens that a translation may have beyond the limit derived from its source's length."""


class Options(NamedTuple):
    """Options of the search; see a recipe's ``decoding``."""

    beam_size: int
    length_penalty_alpha: float
    length_penalty_beta: float
    max_output_factor: float
    nbest_size: int = 1

    def penalty(self, length: float | Ids) -> _Totals:
        """Returns the length penalty ((beta + length) / (beta + 1)) ** alpha."""
        base = (self.length_penalty_beta + np.asarray(length, np.float64)) / (self.length_penalty_beta + 1.0)
        return np.asarray(base**self.length_penalty_alpha, np.float64)


class RuntimeHypothesis(NamedTuple):
    """Translation: its ids without EOS, its score, and its log-probability with EOS."""

    ids: list[int]
    score: float
    log_probability: float


def output_limits(lengths: Ids, factor: float, longest: int) -> Ids:
    """Returns the largest output lengths without EOS from source lengths (B,) and the ``longest`` of training."""
    limits: Ids = np.floor(lengths * factor).astype(np.int64) + _EXTRA
    return np.minimum(limits, np.maximum(lengths + _EXTRA, int(longest * factor) + _EXTRA))


def beam_search(
    model: RuntimeModel,
    source: Ids,
    padding: npt.NDArray[np.bool_],
    limits: Ids,
    options: Options,
    allowed: npt.NDArray[np.bool_] | None,
) -> list[list[RuntimeHypothesis]]:
    """Returns the n best translations of each sentence, best first; none if no probability is finite.

    Args:
        model: Translation model.
        source: Source ids with EOS, (B, S). padding: (B, S). limits: Largest output lengths, (B,).
        options: Options of the search.
        allowed: Words that each sentence may use, (B, V), or None for all words.
    """
    count, beam = len(source), options.beam_size
    sources, state = model.encode(source, padding)
    output = model.output_layer(allowed)
    width = min(beam, output.size)
    skipped = np.array([PAD, BOS])
    tokens, owners, totals = np.full(count, BOS), np.arange(count), np.zeros(count)
    slots = np.zeros(count, np.int64)
    free, best = np.full(count, beam), np.full((count, options.nbest_size), -np.inf)
    longest_penalty = options.penalty(limits + 1)
    ended: list[list[_Ended]] = [[] for _ in range(count)]
    trace: list[tuple[Ids, Ids]] = []
    position = 0
    while len(owners):
        position += 1
        words = tokens if output.words is None else output.words[owners, tokens]
        logits, state = model.step(words, sources, state, output)
        values, numbers, end = library.best_words(logits, width, skipped)
        last = position > limits[owners]
        if last.any():
            values[last], numbers[last, 0] = -np.inf, EOS
            values[last, 0] = end[last]
        grid = np.full((count, beam, width), -np.inf)
        grid[owners, slots] = totals[:, None] + values
        rows = np.zeros((count, beam), np.int64)
        rows[owners, slots] = np.arange(len(owners))
        flat = grid.reshape(count, -1)
        order = np.argsort(-flat, axis=1, kind="stable")[:, :beam]
        top_totals = np.take_along_axis(flat, order, 1)
        parents = np.take_along_axis(rows, order // width, 1)
        chosen = numbers[parents, order % width]
        kept = (np.arange(beam) < free[:, None]) & (top_totals > -np.inf)
        ends = kept & (chosen == EOS)
        grows = kept & ~ends
        penalty = float(options.penalty(position))
        for sentence, column in zip(*(part.tolist() for part in ends.nonzero()), strict=True):
            total = float(top_totals[sentence, column])
            ended[sentence].append((total / penalty, total, position, int(parents[sentence, column])))
            scores = sorted([*best[sentence].tolist(), total / penalty], reverse=True)
            best[sentence] = scores[: options.nbest_size]
        free = free - ends.sum(1)
        reach = np.where(grows, top_totals, -np.inf).max(1) / longest_penalty
        growing = grows & (best[:, -1] < reach)[:, None]
        owners, columns = (np.ascontiguousarray(part) for part in growing.nonzero())  # columns of one array
        tokens, parents, totals = (part[owners, columns] for part in (chosen, parents, top_totals))
        slots = (growing.cumsum(1) - 1)[owners, columns]
        trace.append((tokens, parents))
        state = state.select(parents, owners)
    return [
        [
            _read(entry, trace, None if output.words is None else output.words[sentence])
            for entry in sorted(entries, key=lambda entry: -entry[0])[: options.nbest_size]
        ]
        for sentence, entries in enumerate(ended)
    ]


def _read(entry: _Ended, trace: list[tuple[Ids, Ids]], words: Ids | None) -> RuntimeHypothesis:
    """Returns the translation that ended at a position, traced back from the row of its last step."""
    score, log_probability, position, row = entry
    ids = []
    for tokens, parents in reversed(trace[: position - 1]):
        ids.append(int(tokens[row]))
        row = int(parents[row])
    ids.reverse()
    return RuntimeHypothesis(ids if words is None else words[ids].tolist(), score, log_probability)
