"""Times functions against each other in one run, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

_SAMPLE_SECONDS = 1e-3
"""A sample repeats a function until it takes at least this long: below it the clock and the call would count."""

_HOPELESS = 1.5
"""A function whose quickest call takes this many times the quickest of all is not called again."""


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
    """Times functions in turns: one sample of each, then the next of each.

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
        for name in alive:
            found = sample(functions[name], repeats[name])
            samples[name].append(found)
            repeats[name] = max(repeats[name], round(_SAMPLE_SECONDS / max(found, 1e-9)))
        if drop:
            best = min(min(samples[name]) for name in alive)
            alive = [name for name in alive if min(first[name], *samples[name]) <= _HOPELESS * best]
    return {name: _timing(samples[name], first[name]) for name in functions}


def _timing(samples: list[float], first: float) -> Timing:
    return Timing(
        quantile(samples, 0.5), quantile(samples, 0.1), quantile(samples, 0.9), tuple(samples), first
    )
