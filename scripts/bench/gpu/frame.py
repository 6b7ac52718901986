"""Compiling, checking and timing that benchmarks of kernels share."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from econmt.bench.rows import in_graph
from scripts.bench.arguments import parser_of
from scripts.bench.layers import Call, in_turns

DEVICE = torch.device("cuda")
WORKERS = 12
"""Processes that compile at the same time."""
COMPILE_SECONDS = 120.0
"""Seconds after which workers that still compile are ended; what they have not compiled is compiled when it runs."""
FAILURES: tuple[type[Exception], ...] = (RuntimeError, ValueError, AssertionError, TypeError, AttributeError)
"""Errors of a kernel, after which the next case is tried."""
with suppress(ImportError):
    from triton import TritonError

    FAILURES = (*FAILURES, TritonError)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Makes the parser of a benchmark whose help text is its module docstring."""
    parser = parser_of(description)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)  # the number of a compiling worker
    return parser


def chosen_parts(parser: argparse.ArgumentParser, parts: Collection[str]) -> tuple[list[str], int | None]:
    """Reads a command line that names parts of a benchmark; returns them, and the number of a compiling worker."""
    names = ", ".join(parts)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {names}; default: all")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(parts):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; give some of {names}")
    return given.parts or list(parts), given.compile


def heading(device: torch.device = DEVICE) -> str:
    """Returns the name of the GPU, or the number of CPU threads, and torch's version."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


def brief(error: Exception) -> str:
    """Returns an error in one line."""
    return f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def compiled_by_workers(name: str, worker: int | None, jobs: Sequence[Call]) -> bool:
    """Runs jobs in several processes, which fill Triton's cache.

    Args:
        name: Name of the benchmark, such as "gpu.lstm".
        worker: Number of this process if it is a worker; None in the process that starts them.
        jobs: Calls that compile all kernels. Errors are ignored, since they show when the kernel is measured.

    Returns:
        True in a worker, which then has nothing more to do.
    """
    if worker is not None:
        for job in jobs[worker::WORKERS]:
            with suppress(*FAILURES):
                job()
                torch.cuda.synchronize()
        return True
    command = [sys.executable, "-m", f"scripts.bench.{name}", *sys.argv[1:], "--compile"]
    workers = [subprocess.Popen([*command, str(number)]) for number in range(min(WORKERS, len(jobs)))]
    deadline = time.monotonic() + COMPILE_SECONDS
    for process in workers:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return False


class KernelTime(NamedTuple):
    """Name of a kernel, the number of its launches and the microseconds that these took."""

    name: str
    launches: int
    microseconds: float


def kernel_times(call: Call) -> list[KernelTime]:
    """Returns the kernels that a call launches, those that take longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if str(event.device_type).endswith("CUDA")]
    kernels = [KernelTime(event.key, event.count, event.self_device_time_total) for event in events]
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


def milliseconds(
    calls: Mapping[str, Call], turns: int = 9, repeats: int = 1, eager: Collection[str] = ()
) -> dict[str, float]:
    """Times calls in CUDA graphs, in turns.

    Args:
        calls: Calls by name.
        turns: Timed samples of each; a sample has as many replays as take about a millisecond.
        repeats: Number of calls in a graph.
        eager: Names of calls that cannot be captured and are made one by one.

    Returns:
        Median milliseconds of one call.
    """
    replays = {
        name: call if name in eager else in_graph(call, DEVICE, repeats) for name, call in calls.items()
    }
    repeated = {name: 1 if name in eager else repeats for name in calls}
    timings = in_turns(replays, turns, DEVICE)
    return {name: 1e3 * timing.median / repeated[name] for name, timing in timings.items()}
