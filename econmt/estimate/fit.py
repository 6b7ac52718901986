"""Finds the largest batch whose predicted step fits a number of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

from econmt.estimate.techniques import Technique, estimate, fixed_bytes
from econmt.parallel.simulated_rank import ALONE, Rank
from econmt.tasks.protocol import Shape, Task
from econmt_memory.measure.ledger import Ledger

MOST_ROWS = 1 << 20
"""Largest number of rows that is considered."""

_PATIENCE = 12
"""Number of estimates after which bisection takes over."""

_LEAP = 16
"""Largest ratio of the rows of an estimate to rows known to fit, since estimates of very many rows are slow."""


class Fit(NamedTuple):
    """Largest batch of a bucket.

    Attributes:
        source, target: Positions of the bucket.
        rows: Sentence pairs of the largest batch that fits; 0 if not even one fits.
        bytes: Bytes of a step on that batch, or on one pair if none fits.
    """

    source: int
    target: int
    rows: int
    bytes: int


def demand(ledger: Ledger) -> int:
    """Returns the bytes that a step takes from its device: the allocator's segments on a GPU, the tensors on a CPU."""
    return ledger.peak if ledger.reserved is None else ledger.reserved


def fit_all(
    task: Task,
    technique: Technique,
    buckets: Sequence[tuple[int, int]],
    budget: int,
    device: str,
    start: int,
    ranks: Sequence[Rank] = (ALONE,),
) -> Iterator[Fit]:
    """Finds the largest batch of each bucket whose step stays within a budget.

    Bytes per row are a sum of products of S and T, each a factor at most once, so along a line of shapes they are a
    parabola. The parabola through previous buckets gives the number of rows to try first.

    Args:
        buckets: Source and target positions (S, T), in order of their sizes.
        budget: Limit in bytes.
        device: "cpu" or "cuda".
        start: Number of rows to try first in the first bucket.
        ranks: Ranks whose steps must all fit; the rows are those of one rank.
    """
    fixed = 0
    shares: dict[int, float] = {}

    @cache
    def needed(bucket: tuple[int, int], rows: int) -> int:
        nonlocal fixed
        ledgers = [estimate(task, technique, Shape(rows, *bucket), device, rank) for rank in ranks]
        ledger = max(ledgers, key=demand)
        fixed = fixed_bytes(ledger)
        return demand(ledger)

    for bucket in buckets:
        size = sum(bucket)
        start = min(max(1, _rows_by_parabola(shares, size, start)), _LEAP * start)
        rows = largest_batch(partial(needed, bucket), budget, start, lambda: fixed)
        largest = Fit(*bucket, rows, needed(bucket, max(1, rows)))
        yield largest
        start = max(1, rows)
        shares[size] = largest.bytes / budget / start


def _rows_by_parabola(shares: Mapping[int, float], size: int, otherwise: int) -> int:
    """Predicts the rows that fit at a size from the share of the budget per row at up to three other sizes."""
    known = list(shares.items())[-3:]
    share = sum(
        value * math.prod((size - other) / (at - other) for other, _ in known if other != at)
        for at, value in known
    )
    return round(1.0 / share) if share > 1.0 / MOST_ROWS and len(known) > 1 else otherwise


def largest_batch(
    needed: Callable[[int], int], budget: int, start: int, fixed: Callable[[], int] = lambda: 0
) -> int:
    """Returns the largest number of rows whose bytes stay within a budget, at most :data:`MOST_ROWS`; 0 if none do.

    Bytes grow nearly linearly with rows, so the line through two known points predicts the result. Where they grow in
    steps, as an allocator's segments do, steps towards the other side double from the fourth estimate on, and after
    :data:`_PATIENCE` estimates the interval is bisected.

    Args:
        needed: Returns the bytes for a number of rows; monotone.
        start: Number of rows to try first.
        fixed: Returns the bytes of no rows; called after the first call of ``needed``.
    """
    fits, fails = 0, MOST_ROWS + 1
    known: dict[int, int] = {}
    rows, stride, before = min(max(1, start), MOST_ROWS), 1, False
    while True:
        known[rows] = needed(rows)
        known.setdefault(0, fixed())
        good = known[rows] <= budget
        fits, fails = (rows, fails) if good else (fits, rows)
        if fails - fits == 1:
            return fits
        stride = 2 * stride if good == before and len(known) > 4 else 1
        before = good
        guess = _secant(known, fits, fails, budget)
        if len(known) > _PATIENCE:
            guess = (fits + fails) // 2
        elif good:
            guess = min(max(guess, fits + stride), _LEAP * fits)
        else:
            guess = min(guess, fails - stride)
        rows = min(max(guess, fits + 1), fails - 1)


def _secant(known: dict[int, int], fits: int, fails: int, budget: int) -> int:
    """Returns the rows at which the line through the two known points nearest to the border reaches the budget."""
    nearest = sorted(known, key=lambda rows: min(abs(rows - fits), abs(rows - fails)))[:2]
    low, high = sorted(nearest)
    slope = (known[high] - known[low]) / (high - low)
    return MOST_ROWS if slope <= 0 else low + int((budget - known[low]) / slope)
