"""Times functions against each other in one run, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

_SAMPLE_SECONDS = 1e-3
"""A sample repeats a function until it takes at least this long: below it the clock and the call would count."""

_HOPELESS = 1.5
"""A function that takes this many times as long as the quickest, in every turn, is not called again."""

_NEAR = 1.1
"""After `_ROUNDS` turns, a function that takes this many times as long as the fastest is not called again either.

Those that remain take more turns, and without it: what runs before a function decides what the caches hold and what
memory the system has just got back. Two layouts of a matrix product that differed by 10 % alone differed by 13 %
between others.
"""

_ROUNDS = 8
"""Turns after which functions are known to some 5 % where single calls differ by 10 to 17 %."""


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
    fits: Callable[[str], bool] = lambda _: True,
    enough: float = math.inf,
) -> dict[str, Timing] | None:
    """Times functions in turns: one sample of each, then the next of each.

    Args:
        functions: by name.
        seconds: that all of it may take. What has not had ``least`` samples by then is not known.
        synchronize: waits for the device.
        clock: tells seconds.
        least: samples of a function that is not dropped.
        most: samples of a function at which it is known well enough; those of functions that were dropped go to the
            others, if these are several.
        drop: leave a function that is clearly slower than another with the samples it has.
        fits: whether a function may be the one to run, asked when all were called; no other is dropped for one that
            may not.
        enough: seconds after which no more samples than ``least`` are taken.

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

    begin = clock()
    end = begin + seconds
    first: dict[str, float] = {}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for name, function in functions.items():
        if first and clock() + least * len(functions) * min(first.values()) > end:
            return None
        first[name] = sample(function, 1)
    # First calls set things up, in libraries too, and so tell nothing of a function that comes early.
    alive = list(functions)
    repeats = {name: max(1, round(_SAMPLE_SECONDS / max(first[name], 1e-9))) for name in functions}
    count = 0
    while _has_more(samples, alive, most) and (count < least or clock() < begin + enough):
        # A round that is bound to take too long is not begun.
        if clock() + sum(min((first[name], *samples[name])) for name in alive) > end:
            if count < least:
                return None
            break
        for name in alive:
            found = sample(functions[name], repeats[name])
            samples[name].append(found)
            repeats[name] = max(repeats[name], round(_SAMPLE_SECONDS / max(found, 1e-9)))
        count += 1
        rivals = [samples[name] for name in alive if fits(name)]
        if drop and rivals:
            alive = [name for name in alive if _is_promising(samples[name], first[name], rivals)]
    return {name: _timing(samples[name], first[name]) for name in functions}


def _has_more(samples: Mapping[str, Sequence[float]], alive: Sequence[str], most: int) -> bool:
    """Whether those that were not dropped take one more turn; for one that is left alone the choice is made."""
    if len(alive) == 1 < len(samples):
        return len(samples[alive[0]]) < min(most, _ROUNDS)
    return sum(len(own) for own in samples.values()) + len(alive) <= most * len(samples)


def _is_promising(own: Sequence[float], first: float, rivals: Sequence[Sequence[float]]) -> bool:
    """Whether a function with these samples may be the fastest yet.

    Args:
        own: its samples.
        first: its first call, which counts if it was quick.
        rivals: samples of the same turns of those that may be faster, perhaps its own too.
    """
    best = [min(turn) for turn in zip(*rivals, strict=True)]
    quick = any(mine <= _HOPELESS * other for mine, other in zip(own, best, strict=True))
    if not (quick or first <= _HOPELESS * min(best)):
        return False
    return len(own) != _ROUNDS or ratio(own, min(rivals, key=_median)) <= _NEAR


def ratio(own: Sequence[float], other: Sequence[float]) -> float:
    """How many times as long one function takes as another: the median over the turns that both took.

    What slows the machine for a while slows both samples of a turn. Over twenty turns this varied by 3 to 4 % from one
    measurement to the next, the ratio of the medians by 3 to 6 %, that of the shortest samples by 3 to 8 %.
    """
    return _median([mine / its for mine, its in zip(own, other, strict=False)])


def compared(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Seconds of functions that took turns, by their ratios to the fastest one in the turns of both.

    Those that remained to the end are compared in the turns that they took alone, if these are enough.

    Args:
        samples: by name; the n-th ones were taken in the n-th turn.
    """
    lengths = sorted({len(own) for own in samples.values()})
    longest, alone = lengths[-1], lengths[-2] if len(lengths) > 1 else 0
    if longest - alone < _ROUNDS:
        alone = 0
    last = {name: own[alone:] for name, own in samples.items() if len(own) == longest}
    fastest = min(last, key=lambda name: _median(last[name]))
    seconds = _median(samples[fastest])
    return {
        name: seconds * ratio(last.get(name, own), last[fastest] if name in last else samples[fastest])
        for name, own in samples.items()
    }


def _median(values: Sequence[float]) -> float:
    return quantile([*values], 0.5)


def _timing(samples: list[float], first: float) -> Timing:
    return Timing(
        quantile(samples, 0.5), quantile(samples, 0.1), quantile(samples, 0.9), tuple(samples), first
    )
