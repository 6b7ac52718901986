"""Tables of a report, which the terminal and the HTML page show alike, their layout, and quantities as text."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from econmt_memory.report.text import printable

Cell = str | int
"""Cell of a table: text, or a number of bytes."""


WIDTH = 80
"""Width in columns of output without a terminal."""
_WRAPPED = 24, 40
"""Widths to which a column of text may be wrapped: between words, and within a word."""

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


def fitted(table: Table, width: int = WIDTH) -> RenderableType:
    """Lays out a table in at most ``width`` columns without cutting cells.

    In a table that is too wide, values shared by all rows move to the title, and headings wrap; if that is not enough,
    its columns are divided over tables one below the other, which all begin with the columns that name a row.

    Args:
        table: table with cells and headings as strings.
        width: maximum number of columns.
    """
    if Console(width=10_000).measure(table).maximum <= width:
        return table
    columns = [_narrow(column) for column in table.columns]
    title = [str(table.title or "")]
    if len(table.rows) > 1:  # shared values go into the title
        shared = [column for column in columns if len({*map(str, column.cells)}) == 1]
        named = [(str(column.header).replace("\n", " "), str(next(iter(column.cells)))) for column in shared]
        title += [f"{head} {value}" for head, value in named if value]
        columns = [column for column in columns if column not in shared] or columns[:1]
    # Text, since names in square brackets or between colons would be taken for markup.
    heading = Text(", ".join(filter(None, title)), style="table.title")
    parts: list[RenderableType] = [heading] if any(title) else []
    for number, part in enumerate(_divided(columns, len(table.rows), width)):
        below = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
        below.columns, below.rows = part, table.rows
        parts += ["", below] if number else [below]
    return Group(*parts)


def _narrow(column: Column) -> Column:
    """Returns a column with a word of the heading a line; of texts, parts between several spaces get lines, too."""
    cells: list[RenderableType] = [Text(re.sub(" {2,}", "\n", str(cell))) for cell in column.cells]
    head, figures = str(column.header).replace(" ", "\n"), column.justify == "right"
    return replace(column, header=head, overflow="fold", no_wrap=figures, _cells=cells)


def _least(column: Column) -> int:
    """Returns the columns of a terminal that a column of a table needs, with the gap before the next."""
    texts = [str(column.header), *map(str, column.cells)]
    longest = max(cell_len(line) for text in texts for line in text.split("\n"))
    if column.no_wrap:
        return longest + 1
    wrapped = max(_WRAPPED[0], *(cell_len(word) for text in texts for word in text.split()))
    return min(longest, wrapped, _WRAPPED[1]) + 1


def _divided(columns: list[Column], count: int, width: int) -> list[list[Column]]:
    """Divides columns over tables of ``width`` columns; each begins with the first ones, as many as tell rows apart."""
    prefixes = [columns[:number] for number in range(1, len(columns) + 1)]
    rows = ({*zip(*(map(str, key.cells) for key in keys), strict=True)} for keys in prefixes)
    keys = next((keys for keys, names in zip(prefixes, rows, strict=True) if len(names) == count), columns)
    if sum(map(_least, keys)) > width // 2 and sum(map(_least, columns)) > width + 1:
        numbers: list[RenderableType] = [str(number) for number in range(1, count + 1)]
        keys = [Column(header="row", justify="right", no_wrap=True, _cells=numbers)]
        columns = [*keys, *columns]
    parts = [[*keys]]
    for column in columns[len(keys) :]:
        if len(parts[-1]) > len(keys) and sum(map(_least, [*parts[-1], column])) > width + 1:
            parts.append([*keys])
        parts[-1].append(column)
    return parts


def table_console() -> Console:
    """Returns a console for tables on standard output: as wide as the terminal, or 80 columns without one."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def print_table(console: Console, table: Table) -> None:
    """Prints a table so that it fits the console."""
    console.print(fitted(table, console.width))
