"""Predicts the peak memory of training steps of many shapes from a few estimates.

The live bytes at one moment of a step are a sum of products of its rows B, source positions S and target positions T,
each a factor at most once; a peak is the largest of such sums. So it never falls when B, S or T grows, it is convex
along every line through the origin, and between two known points of such a line the chord is an upper bound. Two
effects bend the line the other way, by about 1 %: workspaces of limited size (a chunk of logits, a block of gates), and
repeated words in larger batches. :meth:`PeakModel.check` corrects them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise

from econmt.tasks.protocol import Shape

_FEW = 2
"""Positions of the smallest estimated step: two, since gradients of weights are accumulated over positions."""


class PeakModel:
    """Upper bound of the peak of a step as a function of its shape.

    Args:
        estimate: Returns the exact peak in bytes for a shape; slower for more positions, but not for more rows.
        largest: Largest rows, source and target positions of any batch.
    """

    def __init__(self, estimate: Callable[[Shape], int], largest: Shape) -> None:
        self._estimate = estimate
        self._largest = largest
        self._raised = 0

    @cached_property
    def most(self) -> int:
        """Peak of the largest shape, which no other one exceeds."""
        return self._estimate(self._largest)

    @cached_property
    def fixed(self) -> int:
        """Peak of the smallest shape."""
        _, source, target = self._largest
        return self._estimate(Shape(1, min(source, _FEW), min(target, _FEW)))

    @cached_property
    def _line(self) -> list[tuple[float, int]]:
        """Ascending shares of the largest shape's positions, and the peaks of all rows with so many positions."""
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
        """Returns an upper bound of the bytes of a step."""
        of_all_rows = self._of_all_rows(shape.source, shape.target)
        return (
            math.ceil(self.fixed + shape.rows / self._largest.rows * (of_all_rows - self.fixed))
            + self._raised
        )

    def rows(self, source: int, target: int, limit: int) -> int:
        """Returns how many rows, at most those of any batch, stay within a limit; 0 if not even one does."""
        available = limit - self._raised - self.fixed
        of_all_rows = self._of_all_rows(source, target) - self.fixed
        if of_all_rows <= 0.0:
            return self._largest.rows if available >= 0 else 0
        return max(0, min(self._largest.rows, math.floor(self._largest.rows * available / of_all_rows)))

    def check(self, shape: Shape) -> bool:
        """Returns True if a shape's exact peak is within its bound; otherwise raises all bounds by the excess."""
        excess = self._estimate(shape) - self(shape)
        self._raised += max(0, excess)
        return excess <= 0
