"""Layout of tables that fit the width of a terminal or page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from textwrap import wrap

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Width in columns of output without a terminal."""


def fitted(table: Table, width: int = WIDTH) -> RenderableType:
    """Lays out a table in at most ``width`` columns without cutting cells.

    In a table that is too wide, values shared by all rows move to the title, and headings wrap; if that is not enough,
    each row becomes a block of names and values.

    Args:
        table: table with cells and headings as strings.
        width: maximum number of columns.
    """
    if _width_of(table) <= width:
        return table
    columns = [(column, list(map(str, column.cells))) for column in table.columns]
    title = [str(table.title or "")]
    if len(table.rows) > 1:  # shared values go into the title
        shared = [(str(column.header), cells[0]) for column, cells in columns if len({*cells}) == 1]
        title += [f"{head} {cell}" for head, cell in shared if cell]
        columns = [(column, cells) for column, cells in columns if len({*cells}) > 1] or columns[:1]
    # Text, since names in square brackets or between colons would be taken for markup.
    heading = Text(", ".join(title), style="table.title")
    narrow = Table(title=heading, box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    heads = [str(column.header) for column, _ in columns]
    for (column, _), head in zip(columns, heads, strict=True):
        narrow.add_column(head.replace(" ", "\n"), justify=column.justify)
    rows = [list(cells) for cells in zip(*(cells for _, cells in columns), strict=True)]
    for cells, row in zip(rows, table.rows, strict=True):
        # Parts of a cell that are separated by several spaces get lines of their own.
        narrow.add_row(*(Text(re.sub(" {2,}", "\n", cell)) for cell in cells), end_section=row.end_section)
    if _width_of(narrow) <= width:
        return narrow
    blocks = [line for row in rows for line in _block(heads, row, width)]
    return Group(*(Text(line) for line in [*wrap(", ".join(title), width), *blocks]))


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


def _block(heads: Iterable[str], cells: Iterable[str], width: int) -> list[str]:
    """Formats a row as lines: the first cell, then names and values without empty cells."""
    (_, first), *rest = zip(heads, cells, strict=True)
    words = [f"{head} {re.sub(' +', ' ', cell).strip()}" for head, cell in rest if cell]
    lines = [f"{first}:"]
    for number, word in enumerate(words, 1):
        word += "," if number < len(words) else ""
        if len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return [part for line in lines for part in wrap(line, width, subsequent_indent="    ")]
