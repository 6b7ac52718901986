"""Frame of the benchmarks: command line, header, timing in turns, ratios, tables and files.

A benchmark makes a :class:`Bench` from its docstring, adds options of its own, and gives rows to :meth:`Bench.report`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console

from econmt.bench.rows import Row, Say, append_csv, circumstances, save_figure, table
from econmt.data.progress_bars import status_line
from econmt.engine.devices import resolve_device
from econmt.errors import EconmtError
from econmt_memory.report.tables import WIDTH, print_table
from econmt_ops.dispatch.capture import GraphCache
from econmt_ops.dispatch.timing import Timing, alternate, synchronizer

PROGRAM = "python -m scripts.bench"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROOT = Path(__file__).resolve().parents[2]
SOURCES = os.pathsep.join(str(ROOT / name) for name in ("", "ops", "memory", "runtime"))
"""Folders of this checkout's packages, as PYTHONPATH names them."""
Call = Callable[..., Any]
Key = TypeVar("Key", bound=Hashable)
WORKERS = 12
"""Processes that compile at the same time."""
COMPILE_SECONDS = 120.0
"""Seconds after which workers that still compile are ended; what they have not compiled is compiled when it runs."""
FAILURES: tuple[type[Exception], ...] = (RuntimeError, ValueError, AssertionError, TypeError, AttributeError)
"""Errors of a case, after which the next one is tried."""
if (
    torch.cuda.is_available()
):  # elsewhere no kernel of Triton runs, and importing it would fix how they are compiled
    from triton import TritonError

    FAILURES = (*FAILURES, TritonError)


class Bench(argparse.ArgumentParser):
    """Command line of a benchmark, and the files and tables that it makes of rows.

    Args:
        description: Docstring of the module, which names its command. It is the help text.
        device: Default of ``--device``: cpu, cuda or auto, a GPU where there is one; without the option if empty.
        turns: Default of ``--turns``; without the option if 0.
        seconds: Default of ``--seconds``; without the option if 0.
        compiles: True if kernels are compiled by workers; see :meth:`compiled`.
        parts: Names of parts, of which the command line may give some.
        threads: Default of ``--threads``; PyTorch's number if 0; without the option if None.

    Attributes:
        device: Device that was chosen, once the command line has been read.
        rows: All rows so far.
    """

    def __init__(
        self,
        description: str | None,
        *,
        device: str = "",
        turns: int = 0,
        seconds: float = 0.0,
        compiles: bool = False,
        parts: Iterable[str] = (),
        threads: int | None = 0,
    ) -> None:
        named = re.search(rf"{PROGRAM} (\S+)", description or "")
        assert named is not None
        self.name = named[1]
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(f"{PROGRAM} {self.name}", description=description, formatter_class=formatter)
        self.device, self.rows = CPU, list[Row]()
        self._say: Say = lambda _: None
        self._words, self._given = list[str](), argparse.Namespace()
        add = self.add_argument
        add("--json", type=Path, metavar="FILE", help="file to write rows, machine, versions and commit to")
        add("--csv", type=Path, metavar="FILE", help="file to append rows to, with machine, versions, commit")
        if threads is not None:
            add("--threads", type=int, default=threads or None, help="CPU threads (%(default)s)")
        if device:
            add("--device", default=device, help="device (%(default)s)")
        if turns:
            add("--turns", type=int, default=turns, help="timed samples of each (%(default)s)")
        if seconds:
            add("--seconds", type=float, default=seconds, help="seconds to time each (%(default)s)")
        if compiles:
            add("--compile", type=int, help=argparse.SUPPRESS)  # the number of a compiling worker
        self._parts = list(parts)
        if self._parts:
            add("parts", nargs="*", metavar="PART", help=f"some of {', '.join(self._parts)}; default: all")

    def begin(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Reads the command line and sets threads and device; returns the options."""
        self._words = list(sys.argv[1:] if words is None else words)
        # Words after -- are another program's, which intermixed parsing would read.
        parse = self.parse_args if "--" in self._words else self.parse_intermixed_args
        self._given = given = parse(self._words)
        if self._parts:
            if unknown := set(given.parts) - set(self._parts):
                self.error(
                    f"unknown parts {', '.join(sorted(unknown))}; give some of {', '.join(self._parts)}"
                )
            given.parts = given.parts or self._parts
        if isinstance(getattr(given, "threads", None), int):
            torch.set_num_threads(given.threads)
        if "device" in given:
            self.device = given.device = resolve_device(given.device)
        return given

    def print_header(self, *more: object) -> None:
        """Prints machine, versions and commit, and what else is given."""
        about = self.about
        machine = about["gpu"] or f"{about['processor']}, {about['threads']} CPU threads"
        parts = (machine, f"torch {about['torch']}", f"commit {about['commit'] or 'unknown'}", about["date"])
        text = ", ".join(map(str, (*parts, *more)))
        print("\n".join(wrap(text, WIDTH, subsequent_indent="  ")), flush=True)

    def say(self, text: str) -> None:
        """Shows what is being measured while :meth:`report` collects rows."""
        self._say(f"{self.name}: {text}")

    def report(self, rows: Iterable[Row], title: str = "", columns: Iterable[str] = ()) -> list[Row]:
        """Writes rows to the files as they come, and then prints them as a table, after Ctrl-C those so far.

        Args:
            rows: Rows by columns; "failure" is printed below the table.
            title: Title of the table; by default the benchmark's name.
            columns: Columns of the table; by default all.
        """
        kept: list[Row] = []
        try:
            with status_line() as self._say:
                for row in rows:
                    kept.append(row)
                    self._write(row)
                    self.say(f"{len(kept)} rows, the last {', '.join(map(str, list(row.values())[:4]))}")
        finally:
            print_rows(kept, title or self.name, columns)
        return kept

    @cached_property
    def about(self) -> Row:
        """Machine, versions and commit."""
        return circumstances(self.device)

    def _write(self, row: Row) -> None:
        self.rows.append(row)
        if self._given.csv is not None:
            append_csv(self._given.csv, [{"bench": self.name, **row}], self.about)
        if self._given.json is not None:
            text = json.dumps({"about": self.about, "rows": self.rows}, indent=1)
            self._given.json.write_text(f"{text}\n", encoding="utf-8")

    def compiled(self, jobs: Sequence[Call]) -> bool:
        """Runs jobs in several processes, which fill Triton's cache.

        Args:
            jobs: Calls that compile all kernels. Errors are ignored, since they show when the kernel is measured.

        Returns:
            True in a worker, which then has nothing more to do.
        """
        worker = self._given.compile
        if worker is not None:
            for job in jobs[worker::WORKERS]:
                with suppress(*FAILURES):
                    job()
                    torch.cuda.synchronize()
            return True
        command = [sys.executable, "-m", "scripts.bench", self.name, *self._words, "--compile"]
        workers = [subprocess.Popen([*command, str(number)]) for number in range(min(WORKERS, len(jobs)))]
        deadline = time.monotonic() + COMPILE_SECONDS
        for process in workers:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        return False


def print_rows(rows: Sequence[Row], title: str, columns: Iterable[str] = ()) -> None:
    """Prints rows as a table of 80 columns, or of the terminal's width, and the failures below it."""
    names = list(columns) or list(dict.fromkeys(name for row in rows for name in row))
    console = Console(highlight=False, **({} if sys.stdout.isatty() else {"width": WIDTH}))
    if rows:
        print_table(console, table(rows, [name for name in names if name != "failure"], title))
    for row in rows:
        if "failure" in row:
            first = ", ".join(str(value) for name, value in row.items() if isinstance(value, str | int))
            print(first if str(row["failure"]) in first else f"{first}, {row['failure']}")
    sys.stdout.flush()


def brief(error: Exception) -> str:
    """Returns an error in one line."""
    if isinstance(error, EconmtError):
        return " ".join(error.lines)
    return f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def figures_of(measure: Callable[[], Row]) -> Row:
    """Returns the figures of a case, or its failure as a column, so that the others are still measured."""
    try:
        return measure()
    except FAILURES as error:
        return {"failure": brief(error)}


def in_graph(function: Callable[[], object], device: torch.device, calls: int = 1) -> Callable[[], object]:
    """Captures ``calls`` calls of a function in a CUDA graph, after two outside; returns a function that replays it."""
    capturer = GraphCache(device)
    with capturer.warming_up():
        function()
        function()
    graph, results = capturer.capture(lambda: [function() for _ in range(calls)])

    def replay(_: object = (function, results)) -> None:  # holds the tensors that the graph reads and writes
        graph.replay()

    return replay


def replayed(run: Call, device: torch.device) -> Call:
    """Returns a call that replays a CUDA graph on a GPU, so that launches do not count; else the call."""
    return in_graph(run, device) if device.type == "cuda" else run


def in_turns(
    calls: Mapping[Key, Call],
    device: torch.device,
    *,
    turns: int = 0,
    seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, Timing]:
    """Times calls in turns: ``turns`` samples of each, or as many as take ``seconds`` for all together.

    Where ``seconds`` do not suffice for a few samples of each, they are doubled.
    """
    numbered = {str(number): call for number, call in enumerate(calls.values())}
    wait = synchronizer(device)
    limits: dict[str, Any] = {"clock": clock, "least": turns, "most": turns} if turns else {}
    while True:
        timings = alternate(numbered, math.inf if turns else seconds, synchronize=wait, drop=False, **limits)
        if timings is not None:
            return dict(zip(calls, timings.values(), strict=True))
        seconds *= 2


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
    runs = {name: call if name in eager else in_graph(call, CUDA, repeats) for name, call in calls.items()}
    timings = in_turns(runs, CUDA, turns=turns)
    return {name: 1e3 * timing.median / (1 if name in eager else repeats) for name, timing in timings.items()}


class Ratio(NamedTuple):
    """Median of the ratios of paired samples, and bounds between which the true median is with 95 % confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Formats the ratio with its bounds."""
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_of(mine: Sequence[float], other: Sequence[float]) -> Ratio:
    """Compares samples of which the n-th were taken one after the other, so that what disturbs both cancels out.

    With fewer than six pairs the bounds are the least and the largest ratio.
    """
    ratios = sorted(one / two for one, two in zip(mine, other, strict=False))
    count, left, below = len(ratios), 0.025 * 2 ** len(ratios), 0
    # The k-th smallest of n samples exceeds the true median as often as fewer than k of n coins show heads.
    while below < (count - 1) // 2 and (left := left - math.comb(count, below)) >= 0:
        below += 1
    below = max(0, below - 1)
    return Ratio(statistics.median(ratios), ratios[below], ratios[-1 - below])


def draw_lines(
    lines: Mapping[str, Mapping[Any, float]],
    path: Path,
    *,
    axes: tuple[str, str],
    title: str = "",
    marker: str = "o",
    ticks: Sequence[float] = (),
) -> None:
    """Draws lines.

    Args:
        lines: Points of each line by its label.
        path: Picture to write; InputError is raised if that fails.
        axes: Labels of both axes.
        title: Title of the picture.
        marker: Marker of the points.
        ticks: Ticks of a logarithmic horizontal axis; none: it is linear, and the vertical one begins at 0.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    plot: Any = figure.add_subplot()
    for label, points in lines.items():
        plot.plot(*zip(*sorted(points.items()), strict=True), marker=marker, label=label)
    if ticks:
        plot.set_xscale("log")
        plot.set_xticks([], minor=True)
        plot.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    else:
        plot.set_ylim(bottom=0)
    plot.set(xlabel=axes[0], ylabel=axes[1], title=title)
    if lines:
        plot.legend(fontsize="small")
    save_figure(figure, path)
