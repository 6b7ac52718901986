"""Tables of a report, which the terminal and the HTML page show alike, and quantities as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from econmt_memory.report.text import printable

Cell = str | int
"""Cell of a table: text, or a number of bytes."""


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
        """Returns the table for a terminal."""
        result = Table(title=self.title)
        for number, column in enumerate(self.columns):
            result.add_column(column, justify="left" if number in self.left else "right")
        for row in self.rows:
            result.add_row(*map(_shown, row))
        result.add_section()
        for row in filter(None, [self.sums, *self.below]):
            result.add_row(*map(_shown, row))
        return result


def _shown(cell: Cell) -> Text:
    """Returns a cell for a terminal, in which nothing is markup."""
    return Text(printable(cell_text(cell)))


def cell_text(cell: Cell) -> str:
    """Returns the text of a cell."""
    return cell if isinstance(cell, str) else format_bytes(cell)


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
