"""Comparison of two memory accounts: what grew, by module and category."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from econmt_memory.account.account import OUTSIDE, Account
from econmt_memory.measure.ledger import Ledger, Moment
from econmt_memory.report.ledger_tables import ledger_table
from econmt_memory.report.page import account_page
from econmt_memory.report.tables import Cell, ReportTable, print_table


@dataclass(frozen=True)
class AccountComparison:
    """Bytes of two accounts, by (category, module) and over time.

    Attributes:
        before, after: Their ledgers.
    """

    before: Ledger
    after: Ledger

    @property
    def grown(self) -> int:
        """Difference of the peaks in bytes; negative if the second is smaller."""
        return self.after.peak - self.before.peak

    def changes(self) -> dict[tuple[str, str], int]:
        """Returns the differences by (category, module) that are not zero, the largest first."""
        before, after = self.before.entries, self.after.entries
        differences = {key: after[key] - before[key] for key in before | after}
        changed = ((key, size) for key, size in differences.items() if size)
        return dict(sorted(changed, key=lambda item: -abs(item[1])))

    def table(self) -> ReportTable:
        """Returns the differences as a table."""
        rows: list[list[Cell]] = [
            [name, category, self.before.entries[category, name], self.after.entries[category, name], size]
            for (category, name), size in self.changes().items()
        ]
        total: list[Cell] = ["all", "", self.before.peak, self.after.peak, self.grown]
        columns = ("module", "category", "before", "after", "change")
        return ReportTable("what changed at the peak", columns, rows, total, left=(0, 1))

    def show(self, console: Console | None = None) -> None:
        """Prints the table to a console; None: standard output."""
        print_table(console or Console(), self.table().for_terminal())

    def save(self, path: Path | str) -> None:
        """Writes an HTML page with the bytes of the second account, and with both over time in one chart."""
        notes = [f"The peak of the reference is {self.before.peak:,} bytes."]
        tables = {"ledger": ledger_table(self.after, "module"), "changes": self.table()}
        text = account_page(self.after, "Memory of two training steps", tables, notes, self.before)
        Path(path).write_text(text, encoding="utf-8")


def compare(before: Account | Path | str, after: Account | Path | str) -> AccountComparison:
    """Compares two accounts, or files of ``Account.to_json`` and of ``econmt profile --json``.

    Raises:
        ValueError: A file is missing, or is no account.
    """
    return AccountComparison(_ledger(before), _ledger(after))


def _ledger(source: Account | Path | str) -> Ledger:
    if isinstance(source, Account):
        return source.rolled_up(None)
    path = Path(source)
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        # A profile's first technique is that of the recipe.
        ledger = data["ledger"] if "ledger" in data else data["profiles"][0]["ledger"]
        rows = ((str(row["category"]), str(row["layer"]), int(row["bytes"])) for row in ledger["entries"])
        entries = Counter({(kind, OUTSIDE if name == "other" else name): size for kind, name, size in rows})
        moments = [Moment(*each) for each in ledger.get("timeline", [])]
        return Ledger(entries.total(), entries, timeline=moments, order=[name for _, name in entries])
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError):
        wanted = "expected the output of Account.to_json or of econmt profile --json"
        raise ValueError(f"{path}: no memory account; {wanted}") from None
