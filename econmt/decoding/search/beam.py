"""Beam search over many sentences at once.

Shapes: B sentences, S source positions, V target vocabulary, K beam size, R rows (growing hypotheses, at most K per
sentence).

Every sentence has K places in the beam. At each position the best continuations of its growing hypotheses fill the
places that have not ended; a hypothesis that ends in EOS keeps its place and stops growing, so that K = 1 is greedy
search. A sentence is finished when none of its hypotheses grows, or when the n best have ended and no growing one can
overtake them. Results do not depend on the other sentences of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from econmt.data.text.vocabulary import BOS, EOS, PAD
from econmt.decoding.search.adjustments import Adjustments, Penalties
from econmt.decoding.search.fusion import ShallowFusion
from econmt.decoding.search.model import SearchModel
from econmt.decoding.search.options import SearchOptions as SearchOptions

MAX_OUTPUT_EXTRA = 10
"""Tokens by which a translation may exceed ``max_output_factor`` times the source length."""

_GROUPS = 16
"""Number of columns in a group, see :func:`_highest`."""

_CROWDED = 0.75
"""Share of unfinished sentences in a batch at or below which finished ones are removed from it."""


class Hypothesis(NamedTuple):
    """Translation found by a search.

    Attributes:
        ids: target ids without BOS and EOS.
        score: log-probability, plus a language model's if there is one, divided by the length penalty, plus the other
            penalties.
        log_probability: natural logarithm of the model's probability of ids and EOS.
        attention: attention of each token and EOS over the source with EOS, (len(ids) + 1, S) float32 on the CPU; None
            if not requested.
        cut: True if the maximum length was reached, after which only EOS may follow.
    """

    ids: list[int]
    score: float
    log_probability: float
    attention: Tensor | None
    cut: bool


def length_penalty(length: Tensor | int, options: SearchOptions) -> Tensor:
    """Computes ((beta + length) / (beta + 1)) ** alpha in float64 (Wu et al., 2016, equation 14; Sockeye's beta)."""
    counted = torch.as_tensor(length, dtype=torch.float64)
    bases = (options.length_penalty_beta + counted) / (options.length_penalty_beta + 1.0)
    # PyTorch's powers differ in the last bit by the position of a number in its tensor.
    powers = [base**options.length_penalty_alpha for base in bases.flatten().tolist()]
    return torch.tensor(powers, dtype=torch.float64).view(bases.shape)


def output_limits(lengths: Tensor, factor: float, longest: int | None = None) -> Tensor:
    """Returns the maximum number of target tokens before EOS for each sentence, (B,) int64 on the CPU.

    Args:
        lengths: source lengths including EOS, (B,). factor: ``max_output_factor``.
        longest: maximum number of source tokens in training. The limit of longer sources is that of this length, or
            their own length plus ``MAX_OUTPUT_EXTRA``, because models tend not to end translations of such sources.
    """
    words = (lengths.cpu() - 1).clamp(min=0)
    limits = (words * factor).floor().long() + MAX_OUTPUT_EXTRA
    if longest is None:
        return limits
    ceiling = (words + MAX_OUTPUT_EXTRA).clamp(min=int(longest * factor) + MAX_OUTPUT_EXTRA)
    return torch.minimum(limits, ceiling)


class Ended(NamedTuple):
    """Hypotheses that ended in EOS at one position.

    Attributes:
        position: number of their tokens, including EOS.
        sentences, rows: sentence, and row of this position's model step that was extended, (E,) int64.
        log_probabilities: (E,) float64, as changed by :mod:`~econmt.decoding.search.adjustments`.
        penalties: values added to their scores, (E,) float64; None: nothing.
        lowered: how much ``log_probabilities`` lie below those of the model, (E,) float64; None: not at all.
    """

    position: int
    sentences: Tensor
    rows: Tensor
    log_probabilities: Tensor
    penalties: Tensor | None = None
    lowered: Tensor | None = None


class Grown(NamedTuple):
    """Rows after one position: their last ``tokens`` (R,) and the rows ``parents`` (R,) that they extend."""

    tokens: Tensor
    parents: Tensor


class Trace:
    """Back pointers of a search, from which translations are read at its end.

    ``grown[t]`` leads from the rows of step t + 1 to those of step t; ``attention[t]`` is the attention of step t.
    """

    def __init__(self) -> None:
        self.grown: list[Grown] = []
        self.ended: list[Ended] = []
        self.attention: list[Tensor] = []

    def hypotheses(self, lengths: Tensor, limits: Tensor, options: SearchOptions) -> list[list[Hypothesis]]:
        """Returns the n best hypotheses of each sentence, best first, equal scores in the order in which they ended.

        ``lengths`` and ``limits``, source lengths including EOS and maximum lengths, are (B,) on the CPU.
        """
        grown = [(step.tokens.tolist(), step.parents.tolist()) for step in self.grown]
        by_sentence: list[list[tuple[float, float, int, int]]] = [[] for _ in range(len(lengths))]
        for ended in self.ended:
            penalty = float(length_penalty(ended.position, options))
            scores = ended.log_probabilities / penalty
            if ended.penalties is not None:
                scores = scores + ended.penalties
            real = ended.log_probabilities
            if ended.lowered is not None:
                real = real + ended.lowered
            entries = (ended.sentences, ended.rows, real, scores)
            for sentence, row, log_probability, score in zip(
                *(part.tolist() for part in entries), strict=True
            ):
                by_sentence[sentence].append((score, log_probability, ended.position, row))
        results = []
        for sentence, candidates in enumerate(by_sentence):
            candidates.sort(key=lambda candidate: -candidate[0])
            chosen = []
            for score, log_probability, position, row in candidates[: options.nbest_size]:
                ids, rows = _walk(grown, position - 1, row)
                attention = None
                if self.attention:
                    width = int(lengths[sentence])
                    seen = [self.attention[step][row, :width] for step, row in enumerate(rows)]
                    attention = torch.stack(seen).float().cpu()
                cut = position == int(limits[sentence]) + 1
                chosen.append(Hypothesis(ids, score, log_probability, attention, cut))
            results.append(chosen)
        return results


def _walk(grown: list[tuple[list[int], list[int]]], step: int, row: int) -> tuple[list[int], list[int]]:
    """Returns the tokens that lead to ``row`` of ``step``, and the rows on this path, ``row`` last."""
    ids, rows = [], [row]
    while step > 0:
        step -= 1
        tokens, parents = grown[step]
        ids.append(tokens[row])
        row = parents[row]
        rows.append(row)
    return ids[::-1], rows[::-1]


class Places(NamedTuple):
    """Contents of the K places of each sentence after one position, best first.

    Attributes:
        totals: log-probabilities, -inf at empty places, (B, K) float64.
        parents, tokens: extended row and the token that extends it, (B, K) int64.
        ends, grows: masks of places with an ended or a growing hypothesis, (B, K).
        costs: by how much this step's token lowers the totals below the log-probability, (B, K) float64; None: not at
            all.
    """

    totals: Tensor
    parents: Tensor
    tokens: Tensor
    ends: Tensor
    grows: Tensor
    costs: Tensor | None = None


def highest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the ``count`` highest values of each row of ``values`` (R, V), descending, and their columns.

    On the CPU equal values come in the order of their columns, as in the C library's search; -inf in any order.
    """
    if values.device.type != "cpu":
        return values.topk(count, dim=1)
    # One more value shows if one that is left out equals the last.
    top, columns = _highest(values, min(count + 1, values.shape[1]))
    equal = (top[:, 1:] == top[:, :-1]) & (top[:, 1:] > -torch.inf)
    rows = equal.any(dim=1).nonzero()[:, 0]
    if len(rows):
        in_order = values[rows].sort(dim=1, descending=True, stable=True)
        columns = columns.index_copy(0, rows, in_order.indices[:, : columns.shape[1]])
    return top[:, :count], columns[:, :count]


def _highest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Computes :func:`highest` on the CPU, with equal values in any order.

    The values lie in the ``count`` groups of columns with the highest maxima. Finding the maxima and searching these
    groups takes a third to a half of the time of searching whole rows.
    """
    width = values.shape[1]
    if width < _GROUPS * _GROUPS * count:
        return values.topk(count, dim=1)
    # Groups are interleaved, so that the maxima of all groups are computed side by side.
    groups, rest = width // _GROUPS, width % _GROUPS
    maxima = values[:, : width - rest].view(-1, _GROUPS, groups).amax(dim=1)
    chosen = maxima.topk(count, dim=1, sorted=False).indices
    columns = (chosen[:, None, :] + torch.arange(0, width - rest, groups)[:, None]).flatten(1)
    if rest:
        last = torch.arange(width - rest, width).expand(len(values), rest)
        columns = torch.cat([columns, last], dim=1)
    top, which = values.gather(1, columns).topk(count, dim=1)
    return top, columns.gather(1, which)


def choose_places(
    values: Tensor, tokens: Tensor, totals: Tensor, sentences: Tensor, places: Tensor, free: Tensor, beam: int
) -> Places:
    """Chooses the best continuations of each sentence.

    Args:
        values, tokens: highest log-probabilities of each row's next token, -inf if ruled out, and the tokens, (R, W).
        totals: log-probability of each row, (R,) float64.
        sentences, places: sentence and place of each row, (R,). free: places that have not ended, (B,).
        beam: K.
    """
    count, width = len(free), values.shape[1]
    grid = totals.new_full((count, beam, width), -torch.inf)
    grid[sentences, places] = totals[:, None] + values
    totals, chosen = highest(grid.view(count, beam * width), beam)
    return places_of(totals, chosen, sentences, places, tokens, free)


def places_of(
    totals: Tensor, chosen: Tensor, sentences: Tensor, places: Tensor, tokens: Tensor, free: Tensor
) -> Places:
    """Returns the places of the chosen continuations.

    Args:
        totals: log-probabilities, best first, (B, K). chosen: place times W plus candidate of each, (B, K).
        sentences, places: sentence and place of each row, (R,). tokens: candidates of each row, (R, W).
        free: places that have not ended, (B,).
    """
    width = tokens.shape[1]
    row_at = torch.zeros_like(chosen)
    row_at[sentences, places] = torch.arange(len(sentences))
    parents = row_at.gather(1, chosen // width)
    words = tokens[parents, chosen % width]
    kept = (torch.arange(totals.shape[1]) < free[:, None]) & (totals > -torch.inf)
    ends = kept & (words == EOS)
    return Places(totals, parents, words, ends, kept & ~ends)


class ContinuationChooser(Protocol):
    """Interface of objects that choose continuations by more than scores, such as ``ConstrainedContinuations``."""

    def limits(self, limits: Tensor, lengths: Tensor, /) -> Tensor:
        """Returns the maximum lengths ``limits`` (B,), increased where translations would not fit.

        ``lengths`` (B,) are those of the sources including EOS.
        """

    def extend(
        self,
        log_probs: Tensor,
        totals: Tensor,
        sentences: Tensor,
        places: Tensor,
        free: Tensor,
        room: Tensor,
        attention: Tensor,
        /,
    ) -> Places:
        """Chooses the best continuations of each sentence.

        Args:
            log_probs: log-probabilities of the next token, which may be overwritten, (R, V).
            totals, sentences, places, free: see :func:`choose_places`.
            room: maximum number of tokens after the chosen one, (R,); -1 if it must be EOS.
            attention: attention over the source at this step, (R, S).
        """

    def added(self, parents: Tensor, penalty: Tensor, /) -> Tensor:
        """Returns what the scores of translations gain that end rows ``parents`` (B, K) now, (B, K) float64.

        ``penalty`` is their length penalty.
        """

    def grow(self, parents: Tensor, tokens: Tensor, /) -> None:
        """Informs that the rows are now those that extend ``parents`` (R',) by ``tokens`` (R',)."""


class _Batch(NamedTuple):
    """Sentences that the search still holds.

    Attributes:
        numbers: index of each in the search's input, (B,). limits: maximum number of tokens before EOS, (B,).
        largest_penalty: length penalty of the longest possible translation, (B,) float64.
        free: places that have not ended, (B,). best_scores: highest scores of ended hypotheses, (B, nbest) float64.
    """

    numbers: Tensor
    limits: Tensor
    largest_penalty: Tensor
    free: Tensor
    best_scores: Tensor

    def keep(self, sentences: Tensor) -> _Batch:
        """Selects the sentences with indices ``sentences`` (C,)."""
        return _Batch(*(part.index_select(0, sentences) for part in self))


@torch.inference_mode()
def beam_search(
    model: SearchModel,
    source: Tensor,
    lengths: Tensor,
    limits: Tensor,
    options: SearchOptions,
    poll: Callable[[], object] = lambda: None,
    chooser: ContinuationChooser | None = None,
    fusion: ShallowFusion | None = None,
) -> list[list[Hypothesis]]:
    """Searches for the translations with the highest scores.

    PAD and BOS are never produced; UNK may be, as in Sockeye, because models over words need it. After ``limits``
    tokens, or ``options.min_output_length`` if that is more, only EOS may follow, with the model's probability. Every
    hypothesis therefore ends in EOS, and its log-probability equals that of teacher forcing.

    Args:
        model: model in evaluation mode, or an ensemble.
        source: ids, EOS and padding, (B, S) int64. lengths: lengths including EOS, (B,) int64.
        limits: maximum number of tokens before EOS, (B,), see :func:`output_limits`.
        poll: called before each step; an exception that it raises ends the search.
        chooser: chooses continuations instead of the scores alone; None: the scores.
        fusion: language model for ``options.lm_weight``.

    Returns:
        The n best hypotheses of each sentence, best first; fewer only if the model gives no others a probability.
    """
    device, beam, lengths_here, limits = source.device, options.beam_size, lengths.cpu(), limits.cpu()
    limits = limits if chooser is None else chooser.limits(limits, lengths_here)
    limits, numbers = limits.clamp(min=options.min_output_length), torch.arange(len(source))
    batch = _Batch(
        numbers,
        limits,
        length_penalty(limits + 1, options),
        torch.full_like(numbers, beam),
        torch.full((len(source), options.nbest_size), -torch.inf, dtype=torch.float64),
    )
    state = model.encode(source, lengths)
    penalties = Penalties(options, lengths_here, source) if options.penalizes else None
    adjustments = Adjustments(options, len(source), fusion)
    tokens = torch.full_like(numbers, BOS, device=device)
    sentences, places = numbers, torch.zeros_like(numbers)
    totals = torch.zeros(len(source), dtype=torch.float64)
    trace, position, shortest = Trace(), 0, int(limits.min())
    while True:
        poll()
        position += 1
        log_probs, attention, state = model.step(tokens, state)
        rule_out(log_probs, batch.limits[sentences] if position > shortest else None, position)
        adjustments.apply(log_probs, position)
        if options.attention:
            trace.attention.append(attention)
        # The rest concerns few numbers, which a CPU processes in less time than launching GPU kernels takes.
        if chooser is None:
            values, words = (part.cpu() for part in highest(log_probs, min(beam, log_probs.shape[1])))
            now = choose_places(values, words, totals, sentences, places, batch.free, beam)
        else:
            room = batch.limits[sentences] - position
            now = chooser.extend(log_probs, totals, sentences, places, batch.free, room, attention)
        owners, columns = now.ends.nonzero(as_tuple=True)
        parents, ended = now.parents[owners, columns], now.totals[owners, columns]
        penalty = length_penalty(position, options)
        reached = now.totals / penalty
        added = torch.zeros_like(reached) if chooser is None else chooser.added(now.parents, penalty)
        if penalties is not None:
            penalties.look(attention)
            added += penalties.of(position, batch.numbers, now.parents)
        scores, extra = reached + added, added[owners, columns]
        steps = now.totals - totals[now.parents]
        lowered = adjustments.lowered(steps, now.parents, now.tokens, now.costs)
        ends = Ended(position, batch.numbers[owners], parents, ended, extra, lowered[owners, columns])
        trace.ended.append(ends)
        scores = scores.masked_fill(~now.ends, -torch.inf)
        best_scores = torch.cat([batch.best_scores, scores], dim=1).topk(options.nbest_size, dim=1).values
        batch = batch._replace(free=batch.free - now.ends.sum(dim=1), best_scores=best_scores)
        growing = _still_growing(now, reached, batch, options)
        sentences, columns = growing.nonzero(as_tuple=True)
        words, parents = now.tokens[sentences, columns], now.parents[sentences, columns]
        totals = now.totals[sentences, columns]
        trace.grown.append(Grown(words, parents))
        if chooser is not None:
            chooser.grow(parents, words)
        if penalties is not None:
            penalties.grow(parents)
        adjustments.grow(parents, words, lowered[sentences, columns])
        if not len(sentences):
            return trace.hypotheses(lengths_here, limits, options)
        places = (growing.cumsum(dim=1) - 1)[sentences, columns]
        tokens, rows, cells = torch.stack([words, parents, sentences * beam + places]).to(device).unbind()
        state = state.select(rows, cells, beam)
        live = growing.any(dim=1)
        if int(live.sum()) <= _CROWDED * len(live):
            kept = live.nonzero()[:, 0]
            state, batch = state.keep(kept.to(device)), batch.keep(kept)
            sentences = (live.cumsum(dim=0) - 1)[sentences]


def _still_growing(now: Places, reached: Tensor, batch: _Batch, options: SearchOptions) -> Tensor:
    """Returns (B, K) bool, True for growing hypotheses that may still be among the n best; ``reached`` are scores."""
    # Totals only fall and length penalties only rise as hypotheses grow, and other penalties are never positive, so
    # this is the highest score that a growing hypothesis can still reach.
    reach = (now.totals.masked_fill(~now.grows, -torch.inf) / batch.largest_penalty[:, None]).amax(dim=1)
    growing = now.grows & (batch.best_scores[:, -1] < reach)[:, None]
    if options.beam_search_stop == "first":
        growing &= batch.best_scores[:, :1] == -torch.inf
    if options.beam_prune:
        growing &= reached >= batch.best_scores[:, :1] - options.beam_prune
    return growing


def rule_out(log_probs: Tensor, limits: Tensor | None, position: int) -> None:
    """Sets ``log_probs`` (R, V) to -inf, in place, for PAD and BOS and, in rows past their limit, for all but EOS.

    ``limits`` (R,) are on any device; None if no row has reached its limit. Positions count from 1.
    """
    log_probs[:, PAD] = -torch.inf
    log_probs[:, BOS] = -torch.inf
    if limits is not None:
        last = (position > limits).to(log_probs.device)
        only_end = log_probs[:, EOS].clone()
        log_probs.masked_fill_(last[:, None], -torch.inf)
        log_probs[:, EOS] = only_end
