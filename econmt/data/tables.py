"""Tables that fit where they are printed, whatever their columns are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from textwrap import wrap

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Columns of what is printed where there is no terminal."""


def fitted(table: Table, width: int = WIDTH) -> RenderableType:
    """A table in at most ``width`` columns, of which no cell is cut or left out.

    One that is too wide tells what all rows share in its title, and gets its heads in several lines and no frame; if
    that is not enough, its rows become blocks of names and values.

    Args:
        table: its cells and heads are strings.
        width: columns.
    """
    if _width_of(table) <= width:
        return table
    columns = [(column, list(map(str, column.cells))) for column in table.columns]
    title = [str(table.title or "")]
    if len(table.rows) > 1:  # what all rows share is told once
        shared = [(str(column.header), cells[0]) for column, cells in columns if len({*cells}) == 1]
        title += [f"{head} {cell}" for head, cell in shared if cell]
        columns = [(column, cells) for column, cells in columns if len({*cells}) > 1] or columns[:1]
    narrow = Table(title=", ".join(title), box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    heads = [str(column.header) for column, _ in columns]
    for (column, _), head in zip(columns, heads, strict=True):
        narrow.add_column(head.replace(" ", "\n"), justify=column.justify)
    rows = [list(cells) for cells in zip(*(cells for _, cells in columns), strict=True)]
    for cells, row in zip(rows, table.rows, strict=True):
        # What stands apart in a cell stands on lines of its own.
        narrow.add_row(*(re.sub(" {2,}", "\n", cell) for cell in cells), end_section=row.end_section)
    if _width_of(narrow) <= width:
        return narrow
    blocks = [line for row in rows for line in _block(heads, row, width)]
    return Group(*(Text(line) for line in [*wrap(", ".join(title), width), *blocks]))


def print_table(console: Console, table: Table) -> None:
    """Print a table so that it fits the console."""
    console.print(fitted(table, console.width))


def _width_of(table: Table) -> int:
    """Columns that a table takes if no cell is wrapped."""
    console = Console(width=10_000)
    return console.measure(table).maximum


def _block(heads: Iterable[str], cells: Iterable[str], width: int) -> list[str]:
    """A row as lines: the first cell, then names and values; empty cells are left out."""
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
