"""Brevity, coverage and word penalties in the scores of translations.

Shapes: B sentences, K beam size, R rows, S source positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt.decoding.search.options import SearchOptions

_LEAST_SEEN = 1e-10
"""Lower bound of the attention that a source position has got, before its logarithm is taken."""


class Penalties:
    """Brevity, coverage and word penalties of a search's hypotheses, none of them positive.

    Args:
        options: options of the search. lengths: source lengths including EOS, (B,) on the CPU.
        source: source ids, (B, S), for shape and device.
    """

    def __init__(self, options: SearchOptions, lengths: Tensor, source: Tensor) -> None:
        self._options = options
        self._expected = lengths.double() * options.brevity_penalty_constant_length_ratio
        self._seen: Tensor | None = None
        if options.coverage_penalty_weight:
            self._seen = torch.zeros(source.shape, device=source.device)
            positions = torch.arange(source.shape[1], device=source.device)
            self._outside = positions >= lengths.to(source.device)[:, None] - 1

    def look(self, attention: Tensor) -> None:
        """Adds the rows' attention (R, S) of this step; S may shrink when the longest sentences finish."""
        if self._seen is not None:
            self._seen = self._seen[:, : attention.shape[1]] + attention

    def of(self, position: int, numbers: Tensor, parents: Tensor) -> Tensor:
        """Computes the penalties of translations of ``position`` tokens, including EOS, (B', K) float64.

        Brevity: weight * min(0, 1 - ratio * source / target) with lengths including EOS, as in Sockeye. Coverage:
        weight * sum over source tokens without EOS of log min(sum of attention, 1) (Wu et al., 2016, equation 15).
        Words: - weight * ``position``, not divided by the length penalty.
        ``numbers`` (B',) are sentence indices, ``parents`` (B', K) the rows that end.
        """
        options = self._options
        short = options.brevity_penalty_weight * (1.0 - self._expected[numbers] / position).clamp(max=0.0)
        penalties = (short - options.word_penalty * position)[:, None].expand(parents.shape)
        if self._seen is not None:
            device = self._seen.device
            seen = self._seen[parents.to(device)].double().clamp(_LEAST_SEEN, 1.0).log()
            seen = seen.masked_fill(self._outside[numbers.to(device)][:, None, : seen.shape[2]], 0.0)
            penalties = penalties + options.coverage_penalty_weight * seen.sum(dim=2).cpu()
        return penalties

    def grow(self, parents: Tensor) -> None:
        """Informs that the rows are now those that extend ``parents`` (R',)."""
        if self._seen is not None:
            self._seen = self._seen[parents.to(self._seen.device)]
