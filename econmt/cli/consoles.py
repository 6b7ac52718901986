"""Where tables are printed and where a person reads what is being done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from econmt.data.tables import WIDTH


def table_console() -> Console:
    """Standard output for tables: as wide as the terminal, 80 columns where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """A function that says on a terminal what is being done, in one line that the next text replaces."""
    with Console(stderr=True, highlight=False).status("") as status:
        yield status.update
