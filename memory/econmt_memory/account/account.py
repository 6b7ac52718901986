"""Memory account of a training step: its tables, its figures by module and category, and its files."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from econmt_memory.account.advice import Advice, advise
from econmt_memory.measure.ledger import CATEGORIES, Ledger, kind_of, ledger_of, summed
from econmt_memory.measure.storages import PHASES, Change
from econmt_memory.report.ledger_tables import largest_table, ledger_data, ledger_table, peak_moment
from econmt_memory.report.page import account_page
from econmt_memory.report.tables import Cell, ReportTable, format_bytes, print_table, shape_text

if TYPE_CHECKING:
    from econmt_memory.account.module_scopes import ModuleScopes, StepFollower

OUTSIDE = "outside of modules"
"""Row of bytes that belong to no module."""

_ASKED = re.compile(r"[Tt]ried to allocate (\d[\d.]*) ?(bytes|KiB|MiB|GiB)?")
_UNITS = {None: 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_LINES = 5
"""Number of lines of the program that a table lists."""


class Account:
    """Account of the bytes, times and operations of a training step.

    It counts at the moment of the peak, or, if the memory was full, at that moment.

    Attributes:
        notes: Sentences for the reader.
        names: Names of modules, in the order of the model.
        full: Bytes that could not be allocated; None if the memory was not full, 0 if the number is unknown.
    """

    def __init__(self, tracker: StepFollower) -> None:
        self.notes: list[str] = []
        self.names: list[str] = []
        self.full: int | None = None
        self._tracker = tracker
        self._scopes: ModuleScopes | None = None

    def fail(self, error: BaseException) -> None:
        """Notes that the step ended with an error."""
        text = str(error) if isinstance(error, RuntimeError | MemoryError) else ""
        is_full = "can't allocate memory" in text or isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_full:
            self.notes.append(f"The step ended with {type(error).__name__}; the account counts until then.")
            return
        asked = _ASKED.search(text)
        self.full = int(float(asked[1]) * _UNITS[asked[2]]) if asked else 0
        size = f" when {format_bytes(self.full)} were requested" if self.full else ""
        self.notes.append(f"The memory was full{size}; the tables show what was alive then.")

    def close(self, scopes: ModuleScopes) -> None:
        """Ends the account, after the step."""
        self.names = list(scopes.kinds)
        self.notes += [f"{name} is compiled: what it computes is one row." for name in scopes.compiled]
        if scopes.in_threads:
            missing = "is not counted" if self._tracker.device.type == "cpu" else "belongs to no module"
            self.notes.append(f"Modules ran in another thread as well; what it allocated {missing}.")
        self._scopes = scopes

    @cached_property
    def ledger(self) -> Ledger:
        """Ledger of the step."""
        if self._scopes is None:
            raise ValueError(
                "the memory account is complete when its with block has ended; read it after the block"
            )
        tracker = self._tracker
        ledger = ledger_of(tracker, at_end=self.full is not None)
        ledger.milliseconds = (
            dict(tracker.milliseconds) if tracker.clock is None else tracker.clock.milliseconds()
        )
        ledger.operations = +tracker.operations
        ledger.seconds = tracker.seconds
        return ledger

    @property
    def peak_bytes(self) -> int:
        """Most live bytes during the step, or live bytes when the memory was full."""
        return self.ledger.peak

    def by_category(self) -> dict[str, int]:
        """Returns the bytes by category; their sum is ``peak_bytes``."""
        return {category: self.ledger.category(category) for category in CATEGORIES}

    def by_module(self, depth: int | None = None) -> dict[str, dict[str, int]]:
        """Returns the bytes by module and category.

        Args:
            depth: Number of levels of modules: 1 for the model's children, 2 for their children, and so on; None: all.
        """
        ledger = self.rolled_up(depth)
        return {
            name: {kind: size for kind in CATEGORIES if (size := ledger.entries.get((kind, name), 0))}
            for name in ledger.layers
        }

    def over_time(self, depth: int | None = None) -> list[tuple[float, str, dict[tuple[str, str], int]]]:
        """Returns the live bytes after each change: milliseconds, phase, and bytes by (category, module)."""
        above, record = self._above(depth), self._settled()
        phases = {begin.changes: begin.phase for begin in record.begins}
        phase = phases.get(0, "forward")
        live: Counter[tuple[str, str]] = Counter()
        moments = []
        older = [Change(0.0, *each) for each in record.start().items()]
        for number, change in enumerate([*older, *record.changes], -len(older)):
            phase = phases.get(number, phase)
            category, name = kind_of(change.storage)
            live[category, above(name)] += change.size
            moments.append((1000.0 * change.seconds, phase, dict(+live)))
        return moments

    def advice(self) -> list[Advice]:
        """Returns changes that would make room, with the bytes that they are predicted to save, largest first."""
        ledger = self.ledger
        assert self._scopes is not None
        return advise(ledger, self._scopes)

    def tables(self, depth: int | None = 2) -> dict[str, ReportTable]:
        """Returns the account's tables by kind."""
        ledger = self.rolled_up(depth)
        tables = {"ledger": ledger_table(ledger, "module"), "times": modules_table(ledger)}
        tables |= {"largest": largest_table(ledger), "lines": lines_table(ledger)}
        if self.full is not None:
            rows: list[list[Cell]] = [[each.text, each.bytes] for each in self.advice()]
            tables["advice"] = ReportTable("what would make room", ("change", "predicted saving"), rows)
        return {kind: table for kind, table in tables.items() if table.rows}

    def show(self, depth: int | None = 2, console: Console | None = None) -> None:
        """Prints the account as tables.

        Args:
            depth: Number of levels of modules; None: all.
            console: Console to print to; None: standard output.
        """
        console = console or Console()
        for table in self.tables(depth).values():
            print_table(console, table.for_terminal())
        for line in (self._summary(), *self.notes):
            console.print(line, highlight=False, markup=False)

    def save(self, path: Path | str, depth: int | None = 2) -> None:
        """Writes the account as an HTML page with charts, which needs no network."""
        title = f"Memory of a training step: {self.names[0] if self.names else 'no modules'}"
        notes = [self._summary(), *self.notes]
        text = account_page(self.rolled_up(depth), title, self.tables(depth), notes)
        Path(path).write_text(text, encoding="utf-8")

    def to_json(self, path: Path | str | None = None) -> str:
        """Returns the account as JSON text, and writes it to ``path`` if that is given."""
        times = self.ledger.milliseconds.items()
        nested = {phase: {name: spent for (when, name), spent in times if when == phase} for phase in PHASES}
        ledger = {**ledger_data(self.ledger), "milliseconds": nested}
        data = {"modules": self.names, "notes": self.notes, "ledger": ledger}
        return _written(json.dumps(data, indent=1) + "\n", path)

    def to_csv(self, path: Path | str | None = None, depth: int | None = None) -> str:
        """Returns one row per module as CSV text, with bytes, milliseconds and operations; writes it to ``path``."""
        ledger = self.rolled_up(depth)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["module", *CATEGORIES, "all", *(f"{phase} ms" for phase in PHASES), "flops"])
        for name in _rows(ledger):
            sizes = [ledger.entries.get((category, name), 0) for category in CATEGORIES]
            times = [round(ledger.milliseconds.get((phase, name), 0.0), 3) for phase in PHASES]
            writer.writerow([name, *sizes, sum(sizes), *times, ledger.operations[name]])
        return _written(text.getvalue(), path)

    def rolled_up(self, depth: int | None) -> Ledger:
        """Returns the ledger whose modules below ``depth`` levels count for those above them."""
        above, ledger = self._above(depth), self.ledger
        names = [*self.names, *(name for _, name in ledger.entries)]
        times = ledger.milliseconds.items()
        return replace(
            ledger,
            entries=summed(((kind, above(name)), size) for (kind, name), size in ledger.entries.items()),
            stash=summed((above(name), size) for name, size in ledger.stash.items()),
            milliseconds=dict(summed(((phase, above(name)), spent) for (phase, name), spent in times)),
            operations=summed((above(name), flops) for name, flops in ledger.operations.items()),
            largest=[tensor._replace(layer=above(tensor.layer)) for tensor in ledger.largest],
            order=list(dict.fromkeys(map(above, names))),
        )

    def _above(self, depth: int | None) -> Any:
        if depth is not None and (not isinstance(depth, int) or depth < 1):
            raise ValueError(f"memory account: depth {depth!r}: give a number of levels, from 1 on, or None")

        def above(name: str) -> str:
            if name == "other":
                return OUTSIDE
            return name if depth is None else ".".join(name.split(".")[:depth])

        return above

    def _settled(self) -> StepFollower:
        _ = self.ledger
        return self._tracker

    def _summary(self) -> str:
        size = f"{format_bytes(self.peak_bytes)} ({self.peak_bytes:,} bytes)"
        if self.full is not None:
            return f"live {size}"
        return f"peak {size}, in the {peak_moment(self.ledger).phase} phase"


def modules_table(ledger: Ledger) -> ReportTable:
    """Lists feature maps kept after the forward pass, milliseconds and operations by module."""
    phases = PHASES if ledger.milliseconds else ()
    rows: list[list[Cell]] = []
    for name in _rows(ledger):
        times = [f"{ledger.milliseconds.get((phase, name), 0.0):,.1f}" for phase in phases]
        rows.append([name, ledger.stash[name], *times, f"{ledger.operations[name] / 1e9:,.3f}"])
    sums = [f"{ledger.phase(phase):,.1f}" for phase in phases]
    total: list[Cell] = ["all", ledger.stashed, *sums, f"{ledger.operations.total() / 1e9:,.3f}"]
    columns = ("module", "stash", *(f"{phase} ms" for phase in phases), "GFLOP")
    return ReportTable("stash, time and operations by module", columns, rows, total)


def lines_table(ledger: Ledger) -> ReportTable:
    """Lists the lines of the program that made the largest feature maps."""
    tensors = [tensor for tensor in ledger.largest if tensor.category == "feature maps" and tensor.line]
    rows: list[list[Cell]] = [
        [tensor.bytes, shape_text(tensor.shape), tensor.layer, tensor.line] for tensor in tensors[:_LINES]
    ]
    columns = ("size", "shape", "module", "line")
    return ReportTable("lines that made the largest feature maps", columns, rows, left=range(1, 4))


def _rows(ledger: Ledger) -> list[str]:
    """Returns the modules that have bytes, time or operations."""
    timed = [name for _, name in ledger.milliseconds]
    return ledger.ordered([*ledger.layers, *ledger.stash, *timed, *ledger.operations])


def _written(text: str, path: Path | str | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    return text
