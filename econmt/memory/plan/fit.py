"""The largest batch under a byte budget, by the estimator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from econmt.memory.estimate.techniques import Technique, estimate, fixed_bytes
from econmt.memory.measure.ledger import Ledger
from econmt.parallel.simulated_rank import ALONE, Rank
from econmt.tasks.protocol import Shape, Task

MOST_ROWS = 1 << 20
"""No batch has more."""

_PATIENCE = 12
"""Looks until bisection takes over."""

_LEAP = 16
"""No look is further off than this times what is known to fit: an estimate of very many rows takes its time."""


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
    """Returns the bytes that a step takes from the device: the allocator's segments on CUDA, the tensors on the CPU."""
    return ledger.peak if ledger.reserved is None else ledger.reserved


def fit(
    task: Task,
    technique: Technique,
    bucket: tuple[int, int],
    budget: int,
    device: str,
    start: int,
    ranks: Sequence[Rank] = (ALONE,),
) -> Fit:
    """The largest batch of a bucket whose step stays within a budget.

    Args:
        task: what is trained.
        technique: how.
        bucket: (S, T), source and target positions.
        budget: bytes.
        device: "cpu" or "cuda".
        start: rows to try first.
        ranks: each of which has to have the room; the rows are those of one.
    """
    fixed = 0

    @cache
    def needed(rows: int) -> int:
        nonlocal fixed
        ledgers = [estimate(task, technique, Shape(rows, *bucket), device, rank) for rank in ranks]
        ledger = max(ledgers, key=demand)
        fixed = fixed_bytes(ledger)
        return demand(ledger)

    rows = largest_batch(needed, budget, start, lambda: fixed)
    return Fit(*bucket, rows, needed(max(1, rows)))


def fit_all(
    task: Task,
    technique: Technique,
    buckets: Sequence[tuple[int, int]],
    budget: int,
    device: str,
    start: int,
    ranks: Sequence[Rank] = (ALONE,),
) -> Iterator[Fit]:
    """The largest batch of each bucket in turn; see :func:`fit`.

    Bytes a row are a sum of products of S and T, each a factor at most once, so along a line of shapes they are a
    parabola: that of the buckets which were done tells where to look first.

    Args:
        task, technique, budget, device, ranks: as for :func:`fit`.
        buckets: (S, T) each, in order of their sizes.
        start: rows to try first in the first bucket.
    """
    done: dict[int, float] = {}
    for number, bucket in enumerate(buckets):
        if number:
            start = min(max(1, _rows_by_parabola(done, sum(bucket), start)), _LEAP * start)
        found = fit(task, technique, bucket, budget, device, start, ranks)
        yield found
        start = max(1, found.rows)
        done[sum(bucket)] = found.bytes / budget / start


def _rows_by_parabola(done: Mapping[int, float], size: int, otherwise: int) -> int:
    """Rows of which each takes its share of a budget, from the shares of up to three other sizes."""
    known = list(done.items())[-3:]
    share = sum(
        value * math.prod((size - other) / (place - other) for other, _ in known if other != place)
        for place, value in known
    )
    return round(1.0 / share) if share > 1.0 / MOST_ROWS and len(known) > 1 else otherwise


def largest_batch(
    needed: Callable[[int], int], budget: int, start: int, fixed: Callable[[], int] = lambda: 0
) -> int:
    """The largest number of rows whose bytes stay within a budget, at most :data:`MOST_ROWS`; 0: none does.

    Bytes grow nearly linearly with rows, so the line through what is known tells where to look next. Where they grow in
    steps, as an allocator's segments do, every look from the fourth on that falls on the same side again goes twice as
    far to the other, and after a dozen looks what is left is halved.

    Args:
        needed: bytes by rows, never falling.
        budget: bytes.
        start: rows to try first.
        fixed: bytes of no rows at all, asked for after the first call of ``needed``.
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
        guess = _where_the_line_meets(known, fits, fails, budget)
        if len(known) > _PATIENCE:
            guess = (fits + fails) // 2
        elif good:
            guess = min(max(guess, fits + stride), _LEAP * fits)
        else:
            guess = min(guess, fails - stride)
        rows = min(max(guess, fits + 1), fails - 1)


def _where_the_line_meets(known: dict[int, int], fits: int, fails: int, budget: int) -> int:
    """Rows at which the line through the two known points nearest to the border reaches the budget."""
    nearest = sorted(known, key=lambda rows: min(abs(rows - fits), abs(rows - fails)))[:2]
    low, high = sorted(nearest)
    slope = (known[high] - known[low]) / (high - low)
    return MOST_ROWS if slope <= 0 else low + int((budget - known[low]) / slope)
