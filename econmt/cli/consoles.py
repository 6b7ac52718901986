"""Where tables are printed and where a person reads what is being done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from econmt.data.files import notice
from econmt.data.tables import WIDTH


def table_console() -> Console:
    """Standard output for tables: as wide as the terminal, 80 columns where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


QUIET_SECONDS = 10.0
"""Where there is no terminal, what takes longer is told as often as that."""


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """A function that says what is being done: on a terminal in one line that the next text replaces.

    Elsewhere, such as in a pipe, in a line on standard error every :data:`QUIET_SECONDS`.
    """
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    doing, ended = "at work", threading.Event()

    def tell() -> None:
        while not ended.wait(QUIET_SECONDS):
            notice(doing)

    def say(text: str) -> None:
        nonlocal doing
        doing = text

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield say
    finally:
        ended.set()
        teller.join()
