"""Beam search over many sentences at once.

Shapes: B sentences, S source positions, V target vocabulary, K beam size, R rows, that is, hypotheses still growing
(at most K a sentence).

Every sentence has K places. At each position the best continuations of its growing hypotheses, as many as there are
places left, are kept; one that ends in EOS keeps its place for good and stops growing, so that K = 1 is greedy search.
A sentence leaves the batch when no place grows any more, or when the hypotheses asked for have ended and no growing one
can overtake them. Results therefore never depend on the other sentences of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from econmt.data.text.subwords import BOS, EOS, PAD
from econmt.decoding.search.model import SearchModel
from econmt.decoding.search.options import SearchOptions as SearchOptions
from econmt.decoding.search.penalties import Penalties

MAX_OUTPUT_EXTRA = 10

_GROUPS = 16
"""Columns of a group when the highest of many numbers are looked for."""

_CROWDED = 0.75
"""The share of a batch's sentences that still grow below which the others are taken out of it."""


class Hypothesis(NamedTuple):
    """One translation.

    Attributes:
        ids: target ids without BOS and EOS.
        score: log-probability divided by the length penalty, plus the other penalties.
        log_probability: natural logarithm of the model's probability of ids and EOS.
        attention: (len(ids) + 1, S) float32 on the CPU, its last row that of EOS, S the source's length with EOS; or
            None if it was not asked for.
        cut: whether the longest output was reached, where nothing but EOS may follow.
    """

    ids: list[int]
    score: float
    log_probability: float
    attention: Tensor | None
    cut: bool


def length_penalty(length: Tensor | int, options: SearchOptions) -> Tensor:
    """((beta + length) / (beta + 1)) ** alpha in float64 (Wu et al., 2016, equation 14, with Sockeye's beta)."""
    counted = torch.as_tensor(length, dtype=torch.float64)
    bases = (options.length_penalty_beta + counted) / (options.length_penalty_beta + 1.0)
    # PyTorch's own powers differ in the last bit with the place of a number in its tensor.
    powers = [base**options.length_penalty_alpha for base in bases.flatten().tolist()]
    return torch.tensor(powers, dtype=torch.float64).view(bases.shape)


def output_limits(lengths: Tensor, factor: float, longest: int | None = None) -> Tensor:
    """Most target tokens before EOS for each sentence.

    Args:
        lengths: (B,) source lengths, EOS counted. factor: ``max_output_factor``. longest: the longest source, in
            tokens, that the model was trained on; a source beyond it may give no more tokens than the longest source
            may, or than it has itself plus ``MAX_OUTPUT_EXTRA``, because such a model tends not to end by itself.

    Returns:
        (B,) int64 on the CPU.
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
        position: tokens of each, EOS counted.
        sentences, rows: (E,) int64, the sentence, and the row of that position's model step that was extended.
        log_probabilities: (E,) float64.
        penalties: (E,) float64 what is added to their scores; None: nothing.
    """

    position: int
    sentences: Tensor
    rows: Tensor
    log_probabilities: Tensor
    penalties: Tensor | None = None


class Grown(NamedTuple):
    """The rows after one position: their newest ``tokens`` (R,) and the rows ``parents`` (R,) that they extend."""

    tokens: Tensor
    parents: Tensor


class Trace:
    """The back pointers of a search, from which translations are read once it is over.

    ``grown[t]`` leads from the rows of step t + 1 to those of step t; ``attention[t]`` is what the rows of step t saw.
    """

    def __init__(self) -> None:
        self.grown: list[Grown] = []
        self.ended: list[Ended] = []
        self.attention: list[Tensor] = []

    def hypotheses(self, lengths: Tensor, limits: Tensor, options: SearchOptions) -> list[list[Hypothesis]]:
        """The n best of each sentence, best first, equal scores in the order in which they ended.

        Args:
            lengths: (B,) source lengths on the CPU, EOS counted. limits: (B,) on the CPU.
        """
        grown = [(step.tokens.tolist(), step.parents.tolist()) for step in self.grown]
        found: list[list[tuple[float, float, int, int]]] = [[] for _ in range(len(lengths))]
        for ended in self.ended:
            penalty = float(length_penalty(ended.position, options))
            scores = ended.log_probabilities / penalty
            if ended.penalties is not None:
                scores = scores + ended.penalties
            entries = (ended.sentences, ended.rows, ended.log_probabilities, scores)
            for sentence, row, log_probability, score in zip(
                *(part.tolist() for part in entries), strict=True
            ):
                found[sentence].append((score, log_probability, ended.position, row))
        results = []
        for sentence, candidates in enumerate(found):
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
    """The tokens that lead to ``row`` of ``step``, and the rows passed on the way, ``row`` the last."""
    ids, rows = [], [row]
    while step > 0:
        step -= 1
        tokens, parents = grown[step]
        ids.append(tokens[row])
        row = parents[row]
        rows.append(row)
    return ids[::-1], rows[::-1]


class Places(NamedTuple):
    """The K places of each sentence after one position, best first.

    Attributes:
        totals: (B, K) float64 log-probabilities; -inf: nothing there.
        parents, tokens: (B, K) int64 the row extended and the token that extends it.
        ends, grows: (B, K) bool the places that hold an ended or a growing hypothesis.
    """

    totals: Tensor
    parents: Tensor
    tokens: Tensor
    ends: Tensor
    grows: Tensor


def highest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest ``count`` of each row of ``values`` (R, V), falling, and where they are: (R, count) each.

    On the CPU equal ones come in the order of their columns, as the C library's search has them; -inf in any order.
    """
    if values.device.type != "cpu":
        return values.topk(count, dim=1)
    # One more shows whether one that is left out equals the last.
    found, columns = _highest(values, min(count + 1, values.shape[1]))
    several = (found[:, 1:] == found[:, :-1]) & (found[:, 1:] > -torch.inf)
    rows = several.any(dim=1).nonzero()[:, 0]
    if len(rows):
        in_order = values[rows].sort(dim=1, descending=True, stable=True)
        columns = columns.index_copy(0, rows, in_order.indices[:, : columns.shape[1]])
    return found[:, :count], columns[:, :count]


def _highest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Computes :func:`highest` on the CPU, with equal values in any order.

    They lie in the groups of columns that have the highest maxima, as many groups as numbers are wanted. Finding the
    maxima and searching those groups takes half to a third of the time of searching whole rows.
    """
    width = values.shape[1]
    if width < _GROUPS * _GROUPS * count:
        return values.topk(count, dim=1)
    # A group is every so manieth column: the maxima of all groups are taken side by side.
    groups, rest = width // _GROUPS, width % _GROUPS
    maxima = values[:, : width - rest].view(-1, _GROUPS, groups).amax(dim=1)
    chosen = maxima.topk(count, dim=1, sorted=False).indices
    columns = (chosen[:, None, :] + torch.arange(0, width - rest, groups)[:, None]).flatten(1)
    if rest:
        last = torch.arange(width - rest, width).expand(len(values), rest)
        columns = torch.cat([columns, last], dim=1)
    found, which = values.gather(1, columns).topk(count, dim=1)
    return found, columns.gather(1, which)


def choose_places(
    values: Tensor,
    tokens: Tensor,
    totals: Tensor,
    sentences: Tensor,
    places: Tensor,
    free: Tensor,
    beam: int,
) -> Places:
    """Choose the best continuations of each sentence.

    Args:
        values, tokens: (R, W) the highest log-probabilities of each row's next token, -inf where it is ruled out.
        totals: (R,) float64 log-probability so far.
        sentences, places: (R,) where each row belongs. free: (B,) places of each sentence that still grow.
    """
    count, width = len(free), values.shape[1]
    grid = totals.new_full((count, beam, width), -torch.inf)
    grid[sentences, places] = totals[:, None] + values
    row_at = sentences.new_zeros((count, beam))
    row_at[sentences, places] = torch.arange(len(sentences))
    return places_of(*highest(grid.view(count, beam * width), beam), row_at, tokens, free)


def places_of(totals: Tensor, chosen: Tensor, row_at: Tensor, tokens: Tensor, free: Tensor) -> Places:
    """Returns the places of the chosen continuations.

    Args:
        totals: log-probabilities, best first, (B, K). chosen: place times W plus candidate of each, (B, K).
        row_at: row at each place, (B, K). tokens: candidates of each row, (R, W). free: (B,) places that still grow.
    """
    width = tokens.shape[1]
    parents = row_at.gather(1, chosen // width)
    words = tokens[parents, chosen % width]
    kept = (torch.arange(totals.shape[1]) < free[:, None]) & (totals > -torch.inf)
    ends = kept & (words == EOS)
    return Places(totals, parents, words, ends, kept & ~ends)


class ContinuationChooser(Protocol):
    """Chooses a search's continuations by more than scores, such as ``ConstrainedContinuations``."""

    def limits(self, limits: Tensor, /) -> Tensor:
        """``limits`` (B,), longer where the translation would not have room."""

    def extend(
        self,
        log_probs: Tensor,
        totals: Tensor,
        sentences: Tensor,
        places: Tensor,
        free: Tensor,
        room: Tensor,
        /,
    ) -> Places:
        """Choose the best continuations of each sentence.

        Args:
            log_probs: (R, V) of the next token, which may be overwritten. totals, sentences, places, free: see
                :func:`choose_places`. room: (R,) most tokens after the one to be chosen; -1 where that must be EOS.
        """

    def grow(self, parents: Tensor, tokens: Tensor, /) -> None:
        """The rows are now those that extend ``parents`` (R',) by ``tokens`` (R',)."""


class _Batch(NamedTuple):
    """The sentences of a search of which a hypothesis may still grow, and some of which none does any more.

    Attributes:
        numbers: (B,) which of the sentences given each one is. limits: (B,) most tokens before EOS.
        most: (B,) float64 the length penalty of its longest translation. free: (B,) places that still grow.
        best_scores: (B, nbest) float64 of what has ended.
    """

    numbers: Tensor
    limits: Tensor
    most: Tensor
    free: Tensor
    best_scores: Tensor

    def keep(self, sentences: Tensor) -> _Batch:
        """The sentences with indices ``sentences`` (C,)."""
        return _Batch(*(part.index_select(0, sentences) for part in self))


@torch.inference_mode()
def beam_search(
    model: SearchModel,
    source: Tensor,
    lengths: Tensor,
    limits: Tensor,
    options: SearchOptions,
    watch: Callable[[], object] = lambda: None,
    chooser: ContinuationChooser | None = None,
) -> list[list[Hypothesis]]:
    """Search for the translations with the highest scores.

    PAD and BOS are never produced; UNK may be, as in Sockeye, since a model over words needs it. After ``limits``
    tokens nothing but EOS may follow, at the model's own probability of it: every hypothesis ends in EOS, and its
    log-probability is what teacher forcing gives for its ids.

    Args:
        model: a model in evaluation mode, or an ensemble.
        source: (B, S) int64 ids, each row its tokens, EOS and padding. lengths: (B,) int64, EOS counted.
        limits: (B,) most tokens before EOS, see :func:`output_limits`.
        options: how to search.
        watch: called before each step; what it raises ends the search.
        steering: chooses the continuations instead of the scores alone.

    Returns:
        The n best hypotheses of each sentence, best first; fewer only if the model allows no more.
    """
    device, beam = source.device, options.beam_size
    lengths_here, limits = lengths.cpu(), limits.cpu()
    if chooser is not None:
        limits = chooser.limits(limits)
    numbers = torch.arange(len(source))
    batch = _Batch(
        numbers,
        limits,
        length_penalty(limits + 1, options),
        torch.full_like(numbers, beam),
        torch.full((len(source), options.nbest_size), -torch.inf, dtype=torch.float64),
    )
    state, penalties = _begin(model, source, lengths, options)
    tokens = torch.full_like(numbers, BOS, device=device)
    sentences, places = numbers, torch.zeros_like(numbers)
    totals = torch.zeros(len(source), dtype=torch.float64)
    trace, position, shortest = Trace(), 0, int(limits.min())
    while True:
        watch()
        position += 1
        log_probs, attention, state = model.step(tokens, state)
        rule_out(log_probs, batch.limits[sentences] if position > shortest else None, position)
        if options.attention:
            trace.attention.append(attention)
        # What follows is about few numbers: on the CPU it takes less time than a GPU takes to be told of it.
        if chooser is None:
            found, words = (part.cpu() for part in highest(log_probs, min(beam, log_probs.shape[1])))
            now = choose_places(found, words, totals, sentences, places, batch.free, beam)
        else:
            room = batch.limits[sentences] - position
            now = chooser.extend(log_probs, totals, sentences, places, batch.free, room)
        owners, columns = now.ends.nonzero(as_tuple=True)
        parents, ended = now.parents[owners, columns], now.totals[owners, columns]
        scores = now.totals / length_penalty(position, options)
        reached, extra = scores, None
        if penalties is not None:
            penalties.look(attention)
            added = penalties.of(position, batch.numbers, now.parents)
            scores, extra = scores + added, added[owners, columns]
        trace.ended.append(Ended(position, batch.numbers[owners], parents, ended, extra))
        scores = scores.masked_fill(~now.ends, -torch.inf)
        best_scores = torch.cat([batch.best_scores, scores], dim=1).topk(options.nbest_size, dim=1).values
        batch = batch._replace(free=batch.free - now.ends.sum(dim=1), best_scores=best_scores)
        # A total only falls as a hypothesis grows, and the penalty only rises with its length, so this is the highest
        # score that any growing hypothesis can still reach; penalties are never above zero.
        reach = (now.totals.masked_fill(~now.grows, -torch.inf) / batch.most[:, None]).amax(dim=1)
        growing = now.grows & (best_scores[:, -1] < reach)[:, None]
        if options.beam_search_stop == "first":
            growing &= best_scores[:, :1] == -torch.inf
        if options.beam_prune:
            growing &= reached >= best_scores[:, :1] - options.beam_prune
        sentences, columns = growing.nonzero(as_tuple=True)
        words, parents = now.tokens[sentences, columns], now.parents[sentences, columns]
        totals = now.totals[sentences, columns]
        trace.grown.append(Grown(words, parents))
        if chooser is not None:
            chooser.grow(parents, words)
        if penalties is not None:
            penalties.grow(parents)
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


def _begin(
    model: SearchModel, source: Tensor, lengths: Tensor, options: SearchOptions
) -> tuple[Any, Penalties | None]:
    """The first state of a search, and its penalties if there are any."""
    state = model.encode(source, lengths)
    penalties = None
    if options.penalizes:
        learned = options.punishes_brevity and options.brevity_penalty_type == "learned"
        ratios = model.length_ratios(state) if learned else None
        penalties = Penalties(options, lengths.cpu(), source, ratios)
    return state, penalties


def rule_out(log_probs: Tensor, limits: Tensor | None, position: int) -> None:
    """Set ``log_probs`` (R, V) to -inf, in place, for PAD and BOS and, in rows past their limit, all but EOS.

    Args:
        limits: (R,) of each row, on any device; None if none has reached it. position: of the next token.
    """
    log_probs[:, PAD] = -torch.inf
    log_probs[:, BOS] = -torch.inf
    if limits is not None:
        last = (position > limits).to(log_probs.device)
        only_end = log_probs[:, EOS].clone()
        log_probs.masked_fill_(last[:, None], -torch.inf)
        log_probs[:, EOS] = only_end
