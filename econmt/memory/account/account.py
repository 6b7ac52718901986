"""Memory account of a training step: its tables, its figures by module and category, and its JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from econmt.data.tables import print_table
from econmt.errors import InputError
from econmt.memory.measure.ledger import CATEGORIES, Ledger, ledger_of
from econmt.memory.measure.tracker import Tracker
from econmt.memory.report.data import ledger_data
from econmt.memory.report.report import largest_table, ledger_table, peak_moment
from econmt.memory.report.tables import format_bytes

if TYPE_CHECKING:
    from econmt.memory.account.module_scopes import ModuleScopes

OUTSIDE = "outside of modules"
"""Row of bytes that belong to no module."""


class Account:
    """Account of the bytes, times and operations of a training step.

    Attributes:
        notes: Sentences for the reader.
        names: Names of modules, in the order of the model.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.notes: list[str] = []
        self.names: list[str] = []
        self._tracker = tracker
        self._closed = False

    def close(self, scopes: ModuleScopes) -> None:
        """Ends the account, after the step."""
        self.names = list(scopes.names.values())
        for name in scopes.compiled:
            self.notes.append(f"{name} is compiled: everything inside of it is one row.")
        self._closed = True

    @cached_property
    def ledger(self) -> Ledger:
        """Ledger of the step."""
        if not self._closed:
            raise InputError(
                "the memory account is complete when its with block has ended; read it after the block"
            )
        return ledger_of(self._tracker)

    @property
    def peak_bytes(self) -> int:
        """Most live bytes during the step."""
        return self.ledger.peak

    def by_category(self) -> dict[str, int]:
        """Returns the bytes at the peak by category; their sum is the peak."""
        return {category: self.ledger.category(category) for category in CATEGORIES}

    def by_module(self, depth: int | None = None) -> dict[str, dict[str, int]]:
        """Returns the bytes at the peak by module and category.

        Args:
            depth: Number of levels of modules: 1 for the model's children, 2 for their children, and so on; None: all.
        """
        ledger = rolled_up(self.ledger, depth, self.names)
        return {
            name: {kind: size for kind in CATEGORIES if (size := ledger.entries.get((kind, name), 0))}
            for name in ledger.layers
        }

    def show(self, depth: int | None = 2, console: Console | None = None) -> None:
        """Prints the account as tables.

        Args:
            depth: Number of levels of modules; None: all.
            console: Console to print to; None: standard output.
        """
        console = console or Console()
        ledger = rolled_up(self.ledger, depth, self.names)
        for table in (ledger_table(ledger, "module"), largest_table(ledger)):
            print_table(console, table.for_terminal())
        peak = f"peak {format_bytes(ledger.peak)} ({ledger.peak:,} bytes), in the {peak_moment(ledger).phase} phase"
        for line in (peak, *self.notes):
            console.print(line, highlight=False, markup=False)

    def data(self) -> dict[str, Any]:
        """Returns the account as JSON values."""
        return {"modules": self.names, "notes": self.notes, "ledger": ledger_data(self.ledger)}

    def to_json(self, path: Path | str | None = None) -> str:
        """Returns the account as JSON text, and writes it to ``path`` if that is given."""
        text = json.dumps(self.data(), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text


def rolled_up(ledger: Ledger, depth: int | None, names: list[str]) -> Ledger:
    """Returns a ledger whose modules below ``depth`` levels count for those above them, in the order of ``names``."""

    def above(name: str) -> str:
        if name == "other":
            return OUTSIDE
        return name if depth is None else ".".join(name.split(".")[:depth])

    def merged(sizes: Mapping[str, int]) -> Counter[str]:
        total: Counter[str] = Counter()
        for name, size in sizes.items():
            total[above(name)] += size
        return total

    entries: Counter[tuple[str, str]] = Counter()
    for (category, name), size in ledger.entries.items():
        entries[category, above(name)] += size
    order = list(dict.fromkeys(above(name) for name in [*names, *(name for _, name in ledger.entries)]))
    largest = [tensor._replace(layer=above(tensor.layer)) for tensor in ledger.largest]
    return replace(ledger, entries=entries, stash=merged(ledger.stash), largest=largest, order=order)
