"""Tables of a report, which the terminal and the HTML page show alike, and quantities as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from econmt_memory.report.text import printable

Cell = str | int
"""Cell of a table: text, or a number of bytes."""


_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


class ReportTable(NamedTuple):
    """A table of a report.

    ``sums`` are below a line, and rows ``below`` after them; columns with indices ``left`` are aligned to the left.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    sums: Sequence[Cell] = ()
    left: Collection[int] = (0,)
    below: Sequence[Sequence[Cell]] = ()

    def for_terminal(self) -> Table:
        """Returns the table for a terminal, with all bytes in one unit, which the headings name."""
        lines = [*self.rows, *filter(None, [self.sums, *self.below])]
        largest = max((cell for row in lines for cell in row if isinstance(cell, int)), default=0)
        unit = next((name for name, size in _UNITS.items() if largest >= 10 * size), "B")
        result = Table(title=self.title)
        for number, column in enumerate(self.columns):
            sizes = any(isinstance(row[number], int) for row in lines)
            result.add_column(
                f"{column} {unit}" if sizes else column, justify="left" if number in self.left else "right"
            )
        for number, row in enumerate(lines, 1):
            result.add_row(*(_shown(cell, unit) for cell in row), end_section=number == len(self.rows))
        return result


def _shown(cell: Cell, unit: str) -> Text:
    """Returns a cell for a terminal, in which nothing is markup; bytes are in ``unit``, and none are blank."""
    if isinstance(cell, int):
        cell = f"{cell / _UNITS[unit]:,.{int(unit != 'B')}f}" if cell else ""
    return Text(printable(cell))


def format_bytes(size: float) -> str:
    """Formats a number of bytes in decimal units, as the literature does: 1.2 MB."""
    for unit in ("B", "kB", "MB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def format_share(part: float, total: float) -> str:
    """Formats a share in percent: 67 %; 0 % of nothing."""
    return f"{100 * part / (total or 1):.0f} %"


def shape_text(shape: Sequence[int]) -> str:
    """Formats a tensor's shape: 128 x 100 x 512; "one value" for a scalar."""
    return " x ".join(map(str, shape)) or "one value"
