"""Times functions against each other in one run, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

_SAMPLE_SECONDS = 1e-3
"""A sample repeats a function until it takes at least this long: below it the clock and the call would count."""

_HOPELESS = 1.5
"""A function that takes this many times as long as the quickest, in every turn, is not called again."""


_NEAR = 0.1
"""Functions that take at most this share longer than the fastest one are timed again without the others.

What runs before a function decides what the caches hold, and what memory the system has just got back: between slower
ones, two layouts of a matrix product that differed by 10 % in turns of their own differed by 4 to 18 %.
"""

_ROUNDS = 8
"""Samples of a function at first, if there are more than two: enough to tell those that are near."""


class Timing(NamedTuple):
    """Seconds of a call: the median, the lowest and the highest decile, all samples in order, and its first call."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]
    first: float


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of ``values`` lies, interpolated between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done what it was told."""
    if device.type != "cuda":
        return _nothing
    return lambda: torch.cuda.synchronize(device)


def _nothing() -> None:
    """The CPU is done when a call returns."""


def alternate(
    functions: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    synchronize: Callable[[], None] = _nothing,
    clock: Callable[[], float] = time.perf_counter,
    least: int = 3,
    most: int = 1000,
    drop: bool = True,
) -> dict[str, Timing] | None:
    """Times functions in turns: one sample of each, then the next of each, the other way round.

    Args:
        functions: by name.
        seconds: that all of it may take. What has not had ``least`` samples by then is not known.
        synchronize: waits for the device.
        clock: tells seconds.
        least: samples of a function that is not dropped.
        most: samples of a function at which it is known well enough.
        drop: leave a function that is clearly slower than another with the samples it has.

    Returns:
        The timings by name, those that were dropped too; None if time did not suffice.
    """

    def sample(function: Callable[[], object], repeats: int) -> float:
        synchronize()
        began = clock()
        for _ in range(repeats):
            function()
        synchronize()
        return (clock() - began) / repeats

    end = clock() + seconds
    first: dict[str, float] = {}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for name, function in functions.items():
        if first and clock() + least * len(functions) * min(first.values()) > end:
            return None
        first[name] = sample(function, 1)
    # First calls set things up, in libraries too, and so tell nothing of a function that comes early.
    alive = list(functions)
    repeats = {name: max(1, round(_SAMPLE_SECONDS / max(first[name], 1e-9))) for name in functions}
    for count in range(most):
        # A round that is bound to take too long is not begun.
        if clock() + sum(min((first[name], *samples[name])) for name in alive) > end:
            if count < least:
                return None
            break
        # Not always after the same one, which may leave the machine better or worse than another.
        for name in alive if count % 2 == 0 else alive[::-1]:
            found = sample(functions[name], repeats[name])
            samples[name].append(found)
            repeats[name] = max(repeats[name], round(_SAMPLE_SECONDS / max(found, 1e-9)))
        if drop:
            fastest = min(min(samples[name]) for name in alive)
            turns = [min(samples[name][turn] for name in alive) for turn in range(count + 1)]
            alive = [
                name
                for name in alive
                if first[name] <= _HOPELESS * fastest
                or any(own <= _HOPELESS * best for own, best in zip(samples[name], turns, strict=True))
            ]
    return {name: _timing(samples[name], first[name]) for name in functions}


def contest(
    functions: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    fits: Callable[[str], bool] = lambda _: True,
    synchronize: Callable[[], None] = _nothing,
    clock: Callable[[], float] = time.perf_counter,
    least: int = 3,
    most: int = 1000,
) -> dict[str, Timing] | None:
    """Times functions in turns to find the fastest: those that are near to it take turns once more, without the others.

    A machine's speed may change by a tenth from one moment to the next. So not all samples of one function are compared
    with all of another, but those of the same turn: the medians are those of the ratios to one function, times its own.

    Args:
        functions: by name.
        seconds: that all of it may take.
        fits: whether a function may be the one to run, asked once all were called; it is the fastest of these that
            others are near to.
        synchronize, clock: see `alternate`.
        least: samples of a function without which it is not known.
        most: samples of a function at which it is known well enough.

    Returns:
        The timings by name; samples are those of the turns with all others. None if time did not suffice.
    """
    end = clock() + seconds
    many = len(functions) > 2
    found = alternate(
        functions,
        seconds,
        synchronize=synchronize,
        clock=clock,
        least=least,
        most=min(most, max(least, _ROUNDS)) if many else most,
    )
    if found is None:
        return None
    medians, spread = paired_medians(found), found
    best = min((medians[name] for name in functions if fits(name)), default=0.0)
    near = [name for name in functions if fits(name) and medians[name] <= (1 + _NEAR) * best]
    needed = (1 + least) * sum(medians[name] for name in near)
    if many and len(near) > 1 and clock() + needed <= end:
        again = alternate(
            {name: functions[name] for name in near},
            end - clock(),
            synchronize=synchronize,
            clock=clock,
            least=least,
            most=most,
        )
        if again is not None:
            alone = paired_medians(again)
            # On the level of before, since the machine may be faster or slower than when the others were timed.
            level = math.exp(sum(math.log(medians[name] / alone[name]) for name in near) / len(near))
            medians |= {name: level * alone[name] for name in near}
            spread = {**found, **again}
    return {
        name: timing._replace(
            median=medians[name],
            low=spread[name].low * medians[name] / spread[name].median,
            high=spread[name].high * medians[name] / spread[name].median,
        )
        for name, timing in found.items()
    }


def paired_medians(timings: Mapping[str, Timing]) -> dict[str, float]:
    """Seconds of each function that took turns with others: its median ratio to the fastest in the same turns.

    Args:
        timings: whose n-th samples were taken in the n-th turn; some functions may have been dropped before the last.
    """
    longest = max(len(timing.samples) for timing in timings.values())
    whole = [timing for timing in timings.values() if len(timing.samples) == longest]
    fastest = min(whole, key=lambda timing: timing.median)
    return {
        name: fastest.median
        * quantile([mine / other for mine, other in zip(timing.samples, fastest.samples, strict=False)], 0.5)
        for name, timing in timings.items()
    }


def _timing(samples: list[float], first: float) -> Timing:
    return Timing(
        quantile(samples, 0.5), quantile(samples, 0.1), quantile(samples, 0.9), tuple(samples), first
    )
