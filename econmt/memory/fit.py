"""The largest batch under a byte budget, by the estimator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from econmt.memory.ledger import Ledger
from econmt.memory.profiling import Shape, Technique, Workload, estimate, fixed_bytes

MOST_ROWS = 1 << 20
"""No batch has more."""


class Fit(NamedTuple):
    """The largest batch of a bucket.

    Attributes:
        source, target: positions of the bucket.
        rows: sentence pairs of the largest batch that fits; 0: not even one does.
        bytes: what a step on that batch takes, on one pair if none fits.
    """

    source: int
    target: int
    rows: int
    bytes: int


def demand(ledger: Ledger) -> int:
    """What a step takes from the device: on CUDA the segments of the allocator, on the CPU the tensors."""
    return ledger.peak if ledger.reserved is None else ledger.reserved


def fit(
    workload: Workload, technique: Technique, bucket: tuple[int, int], budget: int, device: str, start: int
) -> Fit:
    """The largest batch of a bucket whose step stays within a budget.

    Args:
        workload: what is trained.
        technique: how.
        bucket: (S, T), source and target positions.
        budget: bytes.
        device: "cpu" or "cuda".
        start: rows to try first.
    """
    fixed = 0

    @cache
    def needed(rows: int) -> int:
        nonlocal fixed
        ledger = estimate(workload, technique, Shape(rows, *bucket), device)
        fixed = fixed_bytes(ledger)
        return demand(ledger)

    rows = largest_batch(needed, budget, start, lambda: fixed)
    return Fit(*bucket, rows, needed(max(1, rows)))


def largest_batch(
    needed: Callable[[int], int], budget: int, start: int, fixed: Callable[[], int] = lambda: 0
) -> int:
    """The largest number of rows whose bytes stay within a budget, at most :data:`MOST_ROWS`; 0: none does.

    Bisection; the line through what is known tells where to look, since bytes grow nearly linearly with rows, so a few
    calls are enough.

    Args:
        needed: bytes by rows, never falling.
        budget: bytes.
        start: rows to try first.
        fixed: bytes of no rows at all, asked for after the first call of ``needed``.
    """
    fits, fails = 0, MOST_ROWS + 1
    known: dict[int, int] = {}
    rows = min(max(1, start), MOST_ROWS)
    while fails - fits > 1:
        width = fails - fits
        known[rows] = needed(rows)
        if known[rows] <= budget:
            fits = rows
        else:
            fails = rows
        known.setdefault(0, fixed())
        guess = _where_the_line_meets(known, fits, fails, budget)
        # A line that does not halve the interval twice in a row is none to trust.
        if fails - fits > width // 2 and len(known) > 4:
            guess = (fits + fails) // 2
        rows = min(max(guess, fits + 1), fails - 1)
    return fits


def _where_the_line_meets(known: dict[int, int], fits: int, fails: int, budget: int) -> int:
    """Rows at which the line through the two known points nearest to the border reaches the budget."""
    nearest = sorted(known, key=lambda rows: min(abs(rows - fits), abs(rows - fails)))[:2]
    low, high = sorted(nearest)
    slope = (known[high] - known[low]) / (high - low)
    return MOST_ROWS if slope <= 0 else low + int((budget - known[low]) / slope)
