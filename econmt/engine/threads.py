"""Chooses the number of CPU threads: from the recipe, the saved run, or a measurement on this machine.

More threads are not always faster: a step of a recurrent network is many small pieces of work, after each of which the
threads wait for one another, and on a busy machine a thread that waits for a core delays all others. The number of
threads changes results by rounding, so a resumed run keeps the number that it began with.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import torch

from econmt.engine.machine import measured_today
from econmt_ops.backends import c as native

MARGIN = 1.1
"""Factor by which more threads must be faster to be chosen; near ties go to fewer threads."""

_ROWS = 64
_STEPS = 10
_ROUNDS = 5
_SIZES = (64, 128, 256, 512, 1024)
"""Hidden sizes of the timed steps; a model's size is rounded up to one of them."""


class Threads(NamedTuple):
    """Number of compute threads, and the reason for it."""

    number: int
    why: str


def crowded(count: int) -> str | None:
    """Returns a one-line warning if ``count`` threads would wait for cores rather than compute, else None."""
    cores = usable_cores()
    if count > cores:
        return f"{count} threads on {cores} cores wait for one another; --threads {cores} is faster"
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # processes, a mean over the last minute
    if count > 1 and busy >= cores:
        return (
            f"{busy:.0f} processes already use the {cores} cores of this machine, and {count} threads wait for one "
            "another; --threads 1 may be faster"
        )
    return None


def missing_library() -> str | None:
    """Returns a one-line warning if econmt was installed without its C library, else None."""
    if native.is_built():
        return None
    return (
        "econmt was installed without its C library: on a CPU it translates two to three times as slowly and trains "
        "more slowly, with the same results; install gcc or set CC, then install econmt again"
    )


def usable_cores() -> int:
    """Returns the number of cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_for(
    wanted: int | None, device: torch.device, size: int, saved: int = 0, processes: int = 1
) -> Threads:
    """Chooses the number of compute threads.

    Args:
        wanted: Number from the recipe or an option; None: the number the run began with, or the fastest on this
            machine.
        size: Size of the model's widest layer.
        saved: Number that the run began with; 0 at its start.
        processes: Number of the run's processes that share this host's cores.
    """
    most = torch.get_num_threads()
    if wanted is not None:
        return Threads(wanted, "set by the recipe or --threads")
    if processes > 1 and device.type == "cpu":
        cores = usable_cores()
        share = max(1, min(most, cores // processes))
        return Threads(share, f"{processes} processes share the {cores} cores")
    if saved:
        return Threads(saved, "as at the beginning of the run")
    if device.type != "cpu":
        return Threads(most, "the GPU computes")
    if most == 1 or "OMP_NUM_THREADS" in os.environ:
        return Threads(most, "one core" if usable_cores() == 1 else "set by OMP_NUM_THREADS")
    width = next((known_width for known_width in _SIZES if known_width >= size), _SIZES[-1])
    times = measured_today(f"steps of {width} by threads", lambda: time_steps(width, candidates(most)))
    count = fewest(times)
    listed = ", ".join(f"{seconds * 1e3:.2f} ms with {name}" for name, seconds in times.items())
    return Threads(
        count,
        f"auto: a step takes {listed}; more threads must be {MARGIN} times as fast; measured once a day",
    )


def candidates(most: int) -> list[int]:
    """Returns the numbers of threads to time: the powers of two up to ``most``, and ``most`` itself."""
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def fewest(times: dict[str, float]) -> int:
    """Returns the smallest number that no larger one beats by the margin; ``times``: seconds by ascending number."""
    best = 0
    for name in times:
        if not best or times[str(best)] > MARGIN * times[name]:
            best = int(name)
    return best


def time_steps(width: int, counts: list[int]) -> dict[str, float]:
    """Measures the seconds of a recurrent step of ``width`` units by number of threads: medians of interleaved rounds.

    The minimum would not show how a busy machine slows threads down.
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
