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
from econmt_memory.measure.storages import Change
from econmt_memory.report.ledger_tables import largest_table, ledger_data, ledger_table, peak_moment
from econmt_memory.report.page import account_page
from econmt_memory.report.tables import Cell, ReportTable, format_bytes, print_table

if TYPE_CHECKING:
    from econmt_memory.account.module_scopes import ModuleScopes, StepFollower

OUTSIDE = "outside of modules"
"""Row of bytes that belong to no module."""

_ASKED = re.compile(r"[Tt]ried to allocate (\d[\d.]*) ?(bytes|KiB|MiB|GiB)?")
_UNITS = {None: 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Account:
    """Account of the bytes of a training step.

    It counts at the moment of the peak, or, if the memory was full, at that moment.

    Attributes:
        notes: Sentences for the reader.
        names: Names of modules, in the order of the model.
        inputs: Bytes of the tensors that a module was called with last, by name.
        kinds: Classes of modules by name; None until the step has ended.
        full: Bytes that could not be allocated; None if the memory was not full, 0 if the number is unknown.
    """

    def __init__(self, tracker: StepFollower) -> None:
        self.notes: list[str] = []
        self.names: list[str] = []
        self.full: int | None = None
        self._tracker = tracker
        self.inputs: dict[str, int] = {}
        self.kinds: dict[str, str] | None = None

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
        self.kinds, self.inputs, self.names = scopes.kinds, scopes.inputs, list(scopes.kinds)
        self.notes += [f"{name} is compiled: what it computes is one row." for name in scopes.compiled]
        if scopes.in_threads:
            missing = "is not counted" if self._tracker.device.type == "cpu" else "belongs to no module"
            self.notes.append(f"Modules ran in another thread as well; what it allocated {missing}.")

    @cached_property
    def ledger(self) -> Ledger:
        """Ledger of the step."""
        if self.kinds is None:
            raise ValueError(
                "the memory account is complete when its with block has ended; read it after the block"
            )
        ledger = ledger_of(self._tracker, at_end=self.full is not None)
        ledger.seconds, ledger.flops = self._tracker.seconds, 0
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
        return advise(self.ledger, self.kinds or {}, self.inputs)

    def tables(self, depth: int | None = 2) -> dict[str, ReportTable]:
        """Returns the account's tables by kind."""
        ledger = self.rolled_up(depth)
        tables = {"ledger": ledger_table(ledger, "module"), "largest": largest_table(ledger)}
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
        data = {"modules": self.names, "notes": self.notes, "ledger": ledger_data(self.ledger)}
        return _written(json.dumps(data, indent=1) + "\n", path)

    def to_csv(self, path: Path | str | None = None, depth: int | None = None) -> str:
        """Returns the bytes of each module as CSV text, and writes it to ``path`` if that is given.

        The last column is what the module kept for the backward pass.
        """
        ledger = self.rolled_up(depth)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["module", *CATEGORIES, "all", "stash"])
        for name in ledger.ordered([*ledger.layers, *ledger.stash]):
            sizes = [ledger.entries.get((category, name), 0) for category in CATEGORIES]
            writer.writerow([name, *sizes, sum(sizes), ledger.stash[name]])
        return _written(text.getvalue(), path)

    def rolled_up(self, depth: int | None) -> Ledger:
        """Returns the ledger whose modules below ``depth`` levels count for those above them."""
        above, ledger = self._above(depth), self.ledger
        names = [*self.names, *(name for _, name in ledger.entries)]
        return replace(
            ledger,
            entries=summed(((kind, above(name)), size) for (kind, name), size in ledger.entries.items()),
            stash=summed((above(name), size) for name, size in ledger.stash.items()),
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


def _written(text: str, path: Path | str | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    return text
