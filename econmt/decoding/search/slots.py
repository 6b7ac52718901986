"""Beam search with fixed shapes: :func:`econmt.decoding.search.beam.beam_search` for CUDA graphs.

A slot holds a sentence and its K places. Places without a growing hypothesis stay, with a total of -inf, and so do
slots of finished sentences until another sentence takes them. Steps do not synchronise with the host, so that they can
be captured in a CUDA graph. Results equal those of ``beam_search``.

Shapes: B slots, K beam size, R = B K rows, V target vocabulary, W = min(K, V), S source positions, T steps of the
longest translation plus one.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
from torch import Tensor

from econmt.data.text.vocabulary import BOS, EOS, PAD
from econmt.decoding.search.beam import Hypothesis, SearchOptions, highest, length_penalty
from econmt.decoding.search.model import SearchGrid
from econmt_ops.backends import triton

MOST_BY_KERNELS = 8
"""Maximum beam size for which two Triton kernels do a step's bookkeeping. With beam size 5 on an H200 a search
takes two thirds of the time that it takes with tensor operations, both in CUDA graphs."""


class Slots:
    """Bookkeeping of a search; all tensors are on the device.

    Args:
        grid: model steps for B slots of K rows. slots: B. steps: T.
        positions: S; None: attention is not kept.
        options: options of the search. device: device of the grid.

    Attributes:
        totals: log-probabilities of growing hypotheses, -inf at places without one, (B, K) float64.
        taken: number of steps of the slot's sentence, (B,) int64.
        ended: ended hypotheses in order: log-probability, and the step of its end times K plus the extended place,
            (B, K + 1, 2) float64. The last row receives values to discard.
        count: number of ended hypotheses, (B,) int64.
        grown: token times K plus the extended place, for each place after each step, (B, T, K) int64.
        seen: attention of each step's rows, (B, T, K, S) float32, or None.
    """

    def __init__(
        self,
        grid: SearchGrid,
        slots: int,
        steps: int,
        positions: int | None,
        options: SearchOptions,
        device: torch.device,
    ) -> None:
        beam = options.beam_size
        self._grid, self._beam = grid, beam
        numbers = torch.arange(slots, device=device)
        lowest = torch.full((slots, beam), -torch.inf, dtype=torch.float64, device=device)
        self._numbers = numbers
        self._places = torch.arange(beam, device=device)
        self._penalties = length_penalty(torch.arange(steps + 1), options).to(device)
        self._start = lowest[0].clone()
        self._start[0] = 0.0
        self._tokens = torch.full_like(lowest, BOS, dtype=torch.int64)
        self._rows = torch.zeros_like(self._tokens)
        self._limits = torch.zeros_like(numbers)
        self._best_scores = lowest[:, : options.nbest_size].clone()
        self.totals = lowest
        self.taken = torch.zeros_like(numbers)
        self.ended = lowest.new_zeros(slots, beam + 1, 2)
        self.count = torch.zeros_like(numbers)
        self.grown = numbers.new_zeros(slots, steps, beam)
        self.seen: Tensor | None = None
        if positions is not None:
            self.seen = torch.zeros(slots, steps, beam, positions, device=device)

    def begin(self, slots: Tensor, entries: Tensor, limits: Tensor) -> None:
        """Starts the grid's waiting sentences ``entries`` (N,) in ``slots`` (N,); pairs may occur several times.

        ``limits`` (B,) are the maximum numbers of tokens before EOS of all waiting sentences.
        """
        self._grid.put(slots, entries)
        self._limits.index_copy_(0, slots, limits.index_select(0, entries))
        self._tokens.index_fill_(0, slots, BOS)
        self._best_scores.index_fill_(0, slots, -torch.inf)
        self.totals.index_copy_(0, slots, self._start.expand(len(slots), -1))
        self.taken.index_fill_(0, slots, 0)
        self.count.index_fill_(0, slots, 0)

    def step(self) -> None:
        """Extends every growing hypothesis by one token."""
        scores, attention = self._grid.step(self._tokens.view(-1))
        if self.seen is not None:
            shape = *self.totals.shape, self.seen.shape[3]
            self.seen[self._numbers, self.taken] = attention.view(shape).to(self.seen.dtype)
        if self._beam <= MOST_BY_KERNELS and triton.serves(scores):
            self._advance_by_kernels(scores)
        else:
            self._advance(scores)
        self._grid.select(self._rows.view(-1))

    def _advance_by_kernels(self, scores: Tensor) -> None:
        """Computes :meth:`_advance` by Triton kernels."""
        importlib.import_module("econmt_ops.backends.triton.beam").advance(
            scores,
            self.totals,
            self.taken,
            self.count,
            self._limits,
            self._penalties,
            self._best_scores,
            self.ended,
            self.grown,
            self._tokens,
            self._rows,
            masked=(PAD, BOS),
            end=EOS,
        )

    def _advance(self, scores: Tensor) -> None:
        """Chooses the best continuations of each sentence from the model's scores (R, V)."""
        beam, before = self._beam, self.totals
        growing = before > -torch.inf
        position = self.taken + 1
        values, words = self._continuations(scores, position > self._limits)
        width = values.shape[2]
        # Values of places without a growing hypothesis are meaningless, and may be NaN.
        sums = torch.where(growing.unsqueeze(2), before.unsqueeze(2) + values, -torch.inf)
        best, flat = sums.view(-1, beam * width).topk(beam, dim=1)
        parents = torch.div(flat, width, rounding_mode="floor")
        chosen = words.view(-1, beam * width).gather(1, flat)
        kept = (self._places < (beam - self.count).unsqueeze(1)) & (best > -torch.inf)
        ends = kept & (chosen == EOS)
        self._note_ended(ends, best, position.unsqueeze(1) * beam + parents)
        ended = (best / self._penalties[position].unsqueeze(1)).masked_fill(~ends, -torch.inf)
        best_scores = torch.cat([self._best_scores, ended], dim=1)
        best_scores = best_scores.topk(self._best_scores.shape[1], dim=1).values
        self._best_scores.copy_(best_scores)
        grown = best.masked_fill(~kept | ends, -torch.inf)
        # Highest score that a growing hypothesis can still reach, as in beam_search.
        reach = grown.amax(dim=1) / self._penalties[self._limits + 1]
        goes_on = best_scores[:, -1] < reach
        self.grown[self._numbers, self.taken] = chosen * beam + parents
        self.taken += growing.any(dim=1)
        self.totals.copy_(grown.masked_fill(~goes_on.unsqueeze(1), -torch.inf))
        self._tokens.copy_(chosen)
        self._rows.copy_(self._numbers.unsqueeze(1) * beam + parents)

    def _continuations(self, scores: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the highest log-probabilities of next tokens, and the tokens, (B, K, W); EOS only where ``last``."""
        log_probs = torch.log_softmax(scores, dim=1, dtype=torch.promote_types(scores.dtype, torch.float32))
        log_probs[:, PAD] = -torch.inf
        log_probs[:, BOS] = -torch.inf
        values, words = highest(log_probs, min(self._beam, log_probs.shape[1]))
        last = last.unsqueeze(1).expand(-1, self._beam).reshape(-1, 1)
        only = torch.full_like(values, -torch.inf)
        only[:, 0] = log_probs[:, EOS]
        values, words = torch.where(last, only, values), words.masked_fill(last, EOS)
        shape = (len(self.totals), self._beam, values.shape[1])
        return values.view(shape), words.view(shape)

    def _note_ended(self, ends: Tensor, totals: Tensor, origins: Tensor) -> None:
        """Appends the hypotheses that end now, a mask (B, K), to the ended ones."""
        behind = self.count.unsqueeze(1) + ends.cumsum(dim=1) - 1
        column = torch.where(ends, behind, self._beam).unsqueeze(2).expand(-1, -1, 2)
        self.ended.scatter_(1, column, torch.stack([totals, origins.to(totals.dtype)], dim=2))
        self.count += ends.sum(dim=1)

    def state(self) -> Tensor:
        """Returns the steps of each slot, or 0 while a hypothesis grows, and its number of ended ones, (2, B) int64."""
        growing = (self.totals > -torch.inf).any(dim=1)
        return torch.stack([self.taken.masked_fill(growing, 0), self.count])

    def read(self, slots: Tensor, steps: int) -> list[Tensor]:
        """Returns the tensors that :func:`hypotheses` reads, for ``slots`` (N,) after at most ``steps``."""
        tables = [self.ended, self.grown[:, :steps]]
        if self.seen is not None:
            tables.append(self.seen[:, :steps])
        return [table.index_select(0, slots) for table in tables]


def hypotheses(
    ended: Tensor,
    grown: Tensor,
    seen: Tensor | None,
    length: int,
    limit: int,
    penalties: Sequence[float],
    most: int,
) -> list[Hypothesis]:
    """Returns the best hypotheses of a sentence, best first, equal scores in the order in which they ended.

    Args:
        ended, grown, seen: one slot's tensors of :class:`Slots` on the CPU: (N, 2) for N ended ones, (T, K), (T, K, S).
        length: source length including EOS. limit: maximum number of tokens before EOS.
        penalties: :func:`~econmt.decoding.search.beam.length_penalty` of each length from 0 on.
        most: maximum number of hypotheses.
    """
    beam, table = grown.shape[1], grown.tolist()
    candidates = []
    for log_probability, origin in ended.tolist():
        position, place = divmod(int(origin), beam)
        candidates.append((log_probability / penalties[position], log_probability, position, place))
    candidates.sort(key=lambda candidate: -candidate[0])
    best = []
    for score, log_probability, position, place in candidates[:most]:
        ids, places = [], [place]
        for step in reversed(table[: position - 1]):
            token, place = divmod(step[place], beam)
            ids.append(token)
            places.append(place)
        attention = None
        if seen is not None:
            attention = seen[torch.arange(position), torch.tensor(places[::-1]), :length]
        best.append(Hypothesis(ids[::-1], score, log_probability, attention, position == limit + 1))
    return best
