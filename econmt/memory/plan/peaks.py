"""PeakModel of training steps of many shapes from a few estimates.

With everything else fixed, the bytes alive at one moment of a step are a sum of products of its rows B, its source
positions S and its target positions T, each of them a factor at most once; a peak is the largest of such sums. So it
never falls when one of the three rises, it is convex along every line through the origin, and what lies between two
known points of such a line is bounded by the chord. Only workspaces that the ops limit (a chunk of logits, a block of
gates) stop growing once they are full, and a batch of twice the words has less than twice as many distinct ones, which
bends the line the other way, by some 1 %; :meth:`PeakModel.check` makes up for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise

from econmt.tasks.protocol import Shape

_FEW = 2
"""Positions of the smallest step estimated: two, since gradients of weights are added up over positions."""


class PeakModel:
    """The peak of a step of one kind as a function of its shape.

    Args:
        estimate: the exact peak in bytes of a step of a shape; slower for more positions, whatever the rows.
        largest: the most rows, source and target positions of any batch.
    """

    def __init__(self, estimate: Callable[[Shape], int], largest: Shape) -> None:
        self._estimate = estimate
        self._largest = largest
        self._raised = 0

    @cached_property
    def most(self) -> int:
        """The peak of the largest shape, which no other exceeds: one estimate."""
        return self._estimate(self._largest)

    @cached_property
    def fixed(self) -> int:
        """The peak of hardly any rows and positions."""
        _, source, target = self._largest
        return self._estimate(Shape(1, min(source, _FEW), min(target, _FEW)))

    @cached_property
    def _line(self) -> list[tuple[float, int]]:
        """Shares of the largest shape's positions, rising to 1, and the peaks of all rows with so many."""
        rows, source, target = self._largest
        known = [(1.0, self.most)]
        for share in (0.5, min(1.0, _FEW / source, _FEW / target)):
            if share < known[0][0]:
                shape = Shape(rows, math.ceil(share * source), math.ceil(share * target))
                known.insert(0, (share, self._estimate(shape)))
        return known

    def _of_all_rows(self, source: int, target: int) -> float:
        share = max(source / self._largest.source, target / self._largest.target)
        for (left, low), (right, high) in pairwise(self._line):
            if share <= right:
                return low + max(0.0, share - left) / (right - left) * (high - low)
        return self.most

    def __call__(self, shape: Shape) -> int:
        """Bytes that a step of a shape does not exceed."""
        whole = self._of_all_rows(shape.source, shape.target)
        return math.ceil(self.fixed + shape.rows / self._largest.rows * (whole - self.fixed)) + self._raised

    def rows(self, source: int, target: int, limit: int) -> int:
        """The most rows of a shape whose step stays within a limit, at most those of any batch; 0: none."""
        room = limit - self._raised - self.fixed
        whole = self._of_all_rows(source, target) - self.fixed
        if whole <= 0.0:
            return self._largest.rows if room >= 0 else 0
        return max(0, min(self._largest.rows, math.floor(self._largest.rows * room / whole)))

    def check(self, shape: Shape) -> bool:
        """Returns True if a shape's exact peak is as predicted; otherwise raises all predictions by the excess."""
        missing = self._estimate(shape) - self(shape)
        self._raised += max(0, missing)
        return missing <= 0
