"""Layout of tables that fit the width of a terminal or page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Column, Table
from rich.text import Text

WIDTH = 80
"""Width in columns of output without a terminal."""
_WRAPPED = 24, 40
"""Widths to which a column of text may be wrapped: between words, and within a word."""


def fitted(table: Table, width: int = WIDTH) -> RenderableType:
    """Lays out a table in at most ``width`` columns without cutting cells.

    In a table that is too wide, values shared by all rows move to the title, and headings wrap; if that is not enough,
    its columns are divided over tables one below the other, which all begin with the columns that name a row.

    Args:
        table: table with cells and headings as strings.
        width: maximum number of columns.
    """
    if _width_of(table) <= width:
        return table
    columns = [_TextColumn.of(column) for column in table.columns]
    title = [str(table.title or "")]
    if len(table.rows) > 1:  # shared values go into the title
        shared = [column for column in columns if len({*column.cells}) == 1]
        title += [f"{column.head} {column.cells[0]}" for column in shared if column.cells[0]]
        columns = [column for column in columns if column not in shared] or columns[:1]
    ends = [row.end_section for row in table.rows]
    parts = [_compact(part, ends) for part in _divided(columns, width)]
    # Text, since names in square brackets or between colons would be taken for markup.
    heading = Text(", ".join(filter(None, title)), style="table.title")
    return Group(*[heading] * bool(heading), parts[0], *(line for part in parts[1:] for line in ("", part)))


class _TextColumn(NamedTuple):
    """Column of a table: its heading, its cells, and True if they are figures, which are never wrapped."""

    head: str
    cells: tuple[str, ...]
    figures: bool

    @classmethod
    def of(cls, column: Column) -> _TextColumn:
        """Returns a column's texts; parts of a cell that are separated by several spaces get lines of their own."""
        cells = tuple(re.sub(" {2,}", "\n", str(cell)) for cell in column.cells)
        return cls(str(column.header), cells, column.justify == "right")

    @property
    def width(self) -> int:
        """Columns of a terminal that this one needs, with the gap before the next."""
        texts = [self.head.replace(" ", "\n"), *self.cells]
        longest = max(cell_len(line) for text in texts for line in text.split("\n"))
        if self.figures:
            return longest + 1
        least = max(_WRAPPED[0], *(cell_len(word) for text in texts for word in text.split()))
        return min(longest, least, _WRAPPED[1]) + 1


def _divided(columns: Sequence[_TextColumn], width: int) -> list[list[_TextColumn]]:
    """Divides columns over tables of ``width`` columns; each begins with the first ones, as many as tell rows apart."""
    count = len(columns[0].cells)
    prefixes = [columns[:number] for number in range(1, len(columns) + 1)]
    unique = (keys for keys in prefixes if len({*zip(*(key.cells for key in keys), strict=True)}) == count)
    keys = next(unique, columns)
    if sum(key.width for key in keys) > width // 2 and sum(column.width for column in columns) > width + 1:
        keys = [_TextColumn("row", tuple(map(str, range(1, count + 1))), figures=True)]
        columns = [*keys, *columns]
    parts = [[*keys]]
    for column in columns[len(keys) :]:
        if len(parts[-1]) > len(keys) and sum(each.width for each in [*parts[-1], column]) > width + 1:
            parts.append([*keys])
        parts[-1].append(column)
    return parts


def _compact(columns: Sequence[_TextColumn], ends: Sequence[bool]) -> Table:
    """Makes a table without a frame; a line follows a row whose entry in ``ends`` is true."""
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for column in columns:
        justify: JustifyMethod = "right" if column.figures else "left"
        result.add_column(
            column.head.replace(" ", "\n"), justify=justify, overflow="fold", no_wrap=column.figures
        )
    for cells, end in zip(zip(*(column.cells for column in columns), strict=True), ends, strict=True):
        result.add_row(*map(Text, cells), end_section=end)
    return result


def table_console() -> Console:
    """Returns a console for tables on standard output: as wide as the terminal, or 80 columns without one."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def print_table(console: Console, table: Table) -> None:
    """Prints a table so that it fits the console."""
    console.print(fitted(table, console.width))


def _width_of(table: Table) -> int:
    """Returns the width of a table without wrapping."""
    console = Console(width=10_000)
    return console.measure(table).maximum
