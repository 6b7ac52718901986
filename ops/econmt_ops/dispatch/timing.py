"""Comparative timing: functions take turns, so that disturbances of the machine affect all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

_SAMPLE_SECONDS = 1e-3
"""Shortest duration of a sample; a faster function is repeated, so that clock and call overhead are negligible."""

_HOPELESS = 1.5
"""Factor over the fastest function; a function that exceeds it in every round is dropped."""

_NEAR = 1.1
"""Factor over the fastest function; a function that exceeds it after `_ROUNDS` rounds is dropped too.

The remaining functions get more rounds, with equal neighbours: a function's time depends on the caches and the memory
that the function before it leaves. Two layouts of a matrix product that differed by 10 % alone differed by 13 % between
others."""

_ROUNDS = 8
"""Rounds after which times are known to about 5 % if single calls vary by 10 to 17 %."""


class Timing(NamedTuple):
    """Seconds of a call: median, lowest and highest decile, all samples in order, and the first call."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]
    first: float


def quantile(values: Sequence[float], share: float) -> float:
    """Returns a quantile of ``values``, interpolated between neighbours."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits until the device has finished."""
    if device.type != "cuda":
        return torch.cpu.synchronize  # which has nothing to wait for
    return lambda: torch.cuda.synchronize(device)


def alternate(
    functions: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    synchronize: Callable[[], None] = torch.cpu.synchronize,
    clock: Callable[[], float] = time.perf_counter,
    least: int = 3,
    most: int = 1000,
    drop: bool = True,
    fits: Callable[[str], bool] = lambda _: True,
    enough: float = math.inf,
) -> dict[str, Timing] | None:
    """Times functions in rounds of one sample each; returns None if the time did not allow ``least`` of them.

    Args:
        functions: Functions by name.
        seconds: Time limit of the whole measurement.
        synchronize: Waits for the device.
        clock: Returns the time in seconds.
        least: Smallest number of samples of a function that is not dropped.
        most: Number of samples at which a function's time is known well enough; samples of dropped functions go to the
            others, if several remain.
        drop: True to stop sampling functions that are clearly slower than another one that ``fits``.
        fits: Returns True if a function is eligible, asked after its first call.
        enough: Seconds after which no more than ``least`` samples are taken.
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
    # First calls include set-up work, also of libraries, so they say little about functions that come early.
    alive = list(functions)
    repeats = {name: max(1, round(_SAMPLE_SECONDS / max(first[name], 1e-9))) for name in functions}
    count = 0
    while _has_more(samples, alive, most) and (count < least or clock() < begin + enough):
        # Do not begin a round that will exceed the time limit.
        if clock() + sum(min((first[name], *samples[name])) for name in alive) > end:
            if count < least:
                return None
            break
        for name in alive:
            elapsed = sample(functions[name], repeats[name])
            samples[name].append(elapsed)
            repeats[name] = max(repeats[name], round(_SAMPLE_SECONDS / max(elapsed, 1e-9)))
        count += 1
        rivals = [samples[name] for name in alive if fits(name)]
        if drop and rivals:
            alive = [name for name in alive if _is_promising(samples[name], first[name], rivals)]
    return {
        name: Timing(quantile(each, 0.5), quantile(each, 0.1), quantile(each, 0.9), tuple(each), first[name])
        for name, each in samples.items()
    }


def _has_more(samples: Mapping[str, Sequence[float]], alive: Sequence[str], most: int) -> bool:
    """Returns True if the remaining functions take another round; a single one stops after a few samples."""
    if len(alive) == 1 < len(samples):
        return len(samples[alive[0]]) < min(most, _ROUNDS)
    return sum(len(own) for own in samples.values()) + len(alive) <= most * len(samples)


def _is_promising(own: Sequence[float], first: float, rivals: Sequence[Sequence[float]]) -> bool:
    """Returns True if a function may still turn out to be the fastest.

    Args:
        own: Samples of the function.
        first: Its first call, which counts if it was fast.
        rivals: Samples, of the same rounds, of the functions it competes with; its own may be among them.
    """
    best = [min(turn) for turn in zip(*rivals, strict=True)]
    quick = any(mine <= _HOPELESS * other for mine, other in zip(own, best, strict=True))
    if not (quick or first <= _HOPELESS * min(best)):
        return False
    return len(own) != _ROUNDS or ratio(own, min(rivals, key=median)) <= _NEAR


def ratio(own: Sequence[float], other: Sequence[float]) -> float:
    """Returns the ratio of two functions' times: the median over the rounds that both took.

    A slow phase of the machine affects both samples of a round. Over twenty rounds this ratio varied by 3 to 4 %
    between measurements, the ratio of the medians by 3 to 6 %, that of the shortest samples by 3 to 8 %.
    """
    return median([mine / its for mine, its in zip(own, other, strict=False)])


def compared(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns comparable seconds of the functions, from their ratios to the fastest one in the rounds that both took.

    Functions that remained to the end are compared in the rounds that they took alone, if these are enough.

    Args:
        samples: Samples by name; those with equal index were taken in the same round.
    """
    lengths = sorted({len(own) for own in samples.values()})
    longest, alone = lengths[-1], lengths[-2] if len(lengths) > 1 else 0
    if longest - alone < _ROUNDS:
        alone = 0
    last = {name: own[alone:] for name, own in samples.items() if len(own) == longest}
    fastest = min(last, key=lambda name: median(last[name]))
    seconds = median(samples[fastest])
    return {
        name: seconds * ratio(last.get(name, own), last[fastest] if name in last else samples[fastest])
        for name, own in samples.items()
    }
