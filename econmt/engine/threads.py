"""Number of CPU threads: as requested, as the run began, or the fastest number on this machine.

More threads are not always faster: a step of a recurrent network is many small pieces of work, after each of which the
threads wait for one another, and on a busy machine the one that waits for a core holds up all others. The number of
threads changes results by rounding, so a run that goes on has as many as it began with.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import torch

from econmt.engine.measurement_cache import remembered
from econmt_ops.backends import c as native

MARGIN = 1.1
"""Factor by which more threads have to be faster to be chosen."""

_ROWS = 64
_STEPS = 10
_ROUNDS = 5
_SIZES = (64, 128, 256, 512, 1024)
"""Widths of the steps that are timed; a model's is rounded up to one of them."""


class Threads(NamedTuple):
    """Number of threads, and the reason for it."""

    number: int
    why: str


def crowded(count: int) -> str | None:
    """One line of warning if ``count`` threads will wait for cores rather than compute; None if not."""
    cores = usable_cores()
    if count > cores:
        return f"{count} threads on {cores} cores: they wait for one another; --threads {cores} is faster"
    busy = _load()
    if count > 1 and busy >= cores:
        return (
            f"{busy:.0f} programs want the {cores} cores of this machine already: {count} threads wait for one "
            "another; --threads 1 may be faster"
        )
    return None


def missing_library() -> str | None:
    """One line of warning if econmt was installed without its C library; None if it is there."""
    if native.is_built():
        return None
    return (
        "econmt was installed without its C library: on a CPU it translates two to three times as slowly and trains "
        "more slowly, with the same results; install gcc or set CC, then install econmt again"
    )


def usable_cores() -> int:
    """The cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_for(
    wanted: int | None, device: torch.device, size: int, saved: int = 0, processes: int = 1
) -> Threads:
    """Returns the number of threads to use.

    Args:
        wanted: by the recipe or an option; None: what a run began with, or what is faster on this machine.
        device: that computes.
        size: of the model's widest layer.
        saved: what the run began with; 0 at its start.
        processes: of the run that share this host's cores.
    """
    most = torch.get_num_threads()
    if wanted is not None:
        return Threads(wanted, "as asked")
    if processes > 1 and device.type == "cpu":
        cores = usable_cores()
        share = max(1, min(most, cores // processes))
        return Threads(share, f"{processes} processes share {cores} cores")
    if saved:
        return Threads(saved, "as the run began")
    if device.type != "cpu":
        return Threads(most, "the GPU computes")
    if most == 1 or "OMP_NUM_THREADS" in os.environ:
        return Threads(most, "one core" if usable_cores() == 1 else "as OMP_NUM_THREADS says")
    width = next((each for each in _SIZES if each >= size), _SIZES[-1])
    times = remembered(f"steps of {width} by threads", lambda: time_steps(width, candidates(most)))
    count = fewest(times)
    listed = ", ".join(f"{seconds * 1e3:.2f} ms with {name}" for name, seconds in times.items())
    return Threads(count, f"auto: a step takes {listed}; more must be {MARGIN} times as fast; kept for today")


def candidates(most: int) -> list[int]:
    """The numbers of threads that are tried: powers of two, and as many as there are."""
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def fewest(times: dict[str, float]) -> int:
    """The fewest threads that no larger number beats by the margin; ``times`` are seconds by number, ascending."""
    best = 0
    for name in times:
        if not best or times[str(best)] > MARGIN * times[name]:
            best = int(name)
    return best


def time_steps(width: int, counts: list[int]) -> dict[str, float]:
    """Seconds of a recurrent step of ``width`` units by number of threads: the median of rounds that take turns.

    Not the shortest: on a busy machine a step is seldom as short, and that is what is to be found out.
    """
    before = torch.get_num_threads()
    weight = torch.full((width, 4 * width), 0.01)
    state = torch.full((_ROWS, width), 0.5)
    rounds: dict[int, list[float]] = {count: [] for count in counts}
    try:
        for number in range(_ROUNDS + 1):
            for count, seconds in rounds.items():
                torch.set_num_threads(count)
                began = time.perf_counter()
                for _ in range(_STEPS):
                    gates = torch.mm(state, weight).sigmoid_()
                    state = gates[:, :width] * gates[:, width : 2 * width].tanh()
                if number:  # the first round starts the threads
                    seconds.append((time.perf_counter() - began) / _STEPS)
    finally:
        torch.set_num_threads(before)
    return {str(count): sorted(seconds)[len(seconds) // 2] for count, seconds in rounds.items()}


def _load() -> float:
    """Returns the load average of the last minute, or 0 where the system does not provide it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
