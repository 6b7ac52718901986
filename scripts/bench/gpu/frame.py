"""Compiling, checking and timing that benchmarks of kernels share."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from econmt_ops.dispatch.capture import Capturer
from scripts.bench.arguments import parser_of

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
Call = Callable[..., Any]


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


def heading() -> str:
    """Returns the name of the GPU and torch's version."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def brief(error: Exception) -> str:
    """Returns an error in one line."""
    return f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def relative(value: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference relative to that of the expected values."""
    return float((value.detach().double() - expected.detach()).norm() / (expected.detach().norm() + 1e-12))


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
    capturer, replays = Capturer(DEVICE), dict[str, Call]()
    for name, call in calls.items():
        with capturer.warming_up():
            call()
            call()

        def repeated(call: Call = call) -> None:
            for _ in range(repeats):
                call()

        replays[name] = repeated if name in eager else capturer.capture(repeated)[0].replay
    samples: dict[str, list[float]] = {name: [] for name in replays}
    counts = dict.fromkeys(replays, 1)
    for _ in range(turns + 1):
        for name, replay in replays.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(counts[name]):
                replay()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / counts[name])
            counts[name] = max(1, round(1.0 / samples[name][-1]))
    return {name: statistics.median(values[1:]) / repeats for name, values in samples.items()}
