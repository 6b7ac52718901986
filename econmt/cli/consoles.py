"""Console for tables."""

from __future__ import annotations

from rich.console import Console

from econmt.data.tables import WIDTH


def table_console() -> Console:
    """Standard output for tables: as wide as the terminal, 80 columns where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)
