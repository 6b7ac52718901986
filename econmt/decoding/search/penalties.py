"""Brevity and coverage penalties of translations' scores.

Shapes: B sentences, K beam size, R rows, S source positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt.decoding.search.options import SearchOptions

_LEAST_SEEN = 1e-10
"""A source position that attention has left out altogether counts as if it had seen this much."""


class Penalties:
    """Brevity and coverage penalties of a search's hypotheses; none is ever above zero.

    Args:
        options: how to search. lengths: (B,) source lengths on the CPU, EOS counted. source: (B, S), for its device.
        ratios: (B,) target tokens that are expected for each source token; None: the constant ratio of the options.
    """

    def __init__(
        self, options: SearchOptions, lengths: Tensor, source: Tensor, ratios: Tensor | None = None
    ) -> None:
        self._options = options
        self._weight = options.brevity_penalty_weight if options.punishes_brevity else 0.0
        expected = options.brevity_penalty_constant_length_ratio if ratios is None else ratios.cpu().double()
        self._wanted = lengths.double() * expected
        self._seen: Tensor | None = None
        if options.coverage_penalty_weight:
            self._seen = torch.zeros(source.shape, device=source.device)
            positions = torch.arange(source.shape[1], device=source.device)
            self._outside = positions >= lengths.to(source.device)[:, None] - 1

    def look(self, attention: Tensor) -> None:
        """Adds the rows' attention (R, S) of this step; S may shrink once the longest sentences are done."""
        if self._seen is not None:
            self._seen = self._seen[:, : attention.shape[1]] + attention

    def of(self, position: int, numbers: Tensor, parents: Tensor) -> Tensor:
        """(B', K) float64 of translations that end here.

        Brevity: weight * min(0, 1 - ratio * source / target), both lengths counting EOS, as Sockeye has it. Coverage:
        weight * sum over source tokens of log min(sum of attention, 1) (Wu et al., 2016, equation 15), EOS left out.

        Args:
            position: their tokens, EOS counted. numbers: (B',) which sentences. parents: (B', K) the rows that end.
        """
        options = self._options
        short = self._weight * (1.0 - self._wanted[numbers] / position).clamp(max=0.0)
        found = short[:, None].expand(parents.shape)
        if self._seen is not None:
            place = self._seen.device
            seen = self._seen[parents.to(place)].double().clamp(_LEAST_SEEN, 1.0).log()
            seen = seen.masked_fill(self._outside[numbers.to(place)][:, None, : seen.shape[2]], 0.0)
            found = found + options.coverage_penalty_weight * seen.sum(dim=2).cpu()
        return found

    def grow(self, parents: Tensor) -> None:
        """The rows are now those that extend ``parents`` (R',)."""
        if self._seen is not None:
            self._seen = self._seen[parents.to(self._seen.device)]
