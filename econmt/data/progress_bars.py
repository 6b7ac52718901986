"""Progress bars and status lines on stderr, which disappear when the work is done; stdout is for results.

Without a terminal, the current activity is printed from time to time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich import progress
from rich.console import Console
from rich.markup import escape

from econmt.data.files import notice
from econmt.errors import printable

_Item = TypeVar("_Item")
_STEP = 1000
_BAR_WIDTH = 20


def seen() -> bool:
    """Returns True if stderr is a terminal."""
    return Console(stderr=True).is_terminal


def _bar(*columns: progress.ProgressColumn, show: bool, transient: bool) -> progress.Progress:
    console = Console(stderr=True, highlight=False)
    columns = progress.TextColumn("{task.description}"), *columns
    hidden = not (show and console.is_terminal)
    return progress.Progress(
        *columns, console=console, transient=transient, redirect_stdout=False, disable=hidden
    )


class _Rate(progress.ProgressColumn):
    """Progress column with the number of items per second."""

    def render(self, task: progress.Task) -> str:
        """Formats the recent rate; empty if it is not known yet."""
        speed = task.finished_speed or task.speed
        if speed is None:
            return ""
        return f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.1f}/s"


@contextmanager
def counting(
    title: str, total: int | None, unit: str, *, show: bool = True
) -> Iterator[Callable[[int], None]]:
    """Shows a bar of ``total`` items (None: unknown), named ``unit``; yields a function that advances it."""
    columns: tuple[progress.ProgressColumn, ...]
    if total is None:
        number = progress.TextColumn(f"{{task.completed:,.0f}} {unit}")
        columns = (progress.SpinnerColumn(), number, _Rate(), progress.TimeElapsedColumn())
    else:
        number = progress.TextColumn(f"{{task.completed:,.0f}} of {{task.total:,.0f}} {unit}")
        columns = (progress.BarColumn(_BAR_WIDTH), number, _Rate(), progress.TimeRemainingColumn())
    with _bar(*columns, show=show, transient=True) as bar:
        task = bar.add_task(escape(printable(title)), total=total)
        yield lambda count: bar.advance(task, count)


def counted(items: Iterable[_Item], more: Callable[[int], None]) -> Iterator[_Item]:
    """Yields the items and calls ``more``, from :func:`counting`, after every 1,000 of them."""
    for number, item in enumerate(items, start=1):
        if number % _STEP == 0:
            more(_STEP)
        yield item


@contextmanager
def download_bar(title: str, total: int | None, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Shows a bar of ``total`` bytes (None: unknown); yields a function that advances it."""
    columns = progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn()
    with _bar(progress.BarColumn(_BAR_WIDTH), *columns, show=show, transient=False) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


QUIET_SECONDS = 10.0
"""Seconds between two status lines if stderr is not a terminal."""


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the current activity: on a terminal in one line that is replaced by the next.

    Without a terminal, the latest activity is printed every :data:`QUIET_SECONDS`.
    """
    if not seen():
        with _periodic_lines() as say:
            yield say
        return
    with _bar(progress.SpinnerColumn(), progress.TimeElapsedColumn(), show=True, transient=True) as bar:
        task = bar.add_task("", total=None, visible=False)
        yield lambda text: bar.update(task, description=escape(printable(text)), visible=True, refresh=True)


@contextmanager
def _periodic_lines() -> Iterator[Callable[[str], None]]:
    doing, finished = "working", threading.Event()

    def print_periodically() -> None:
        while not finished.wait(QUIET_SECONDS):
            notice(doing)

    def say(text: str) -> None:
        nonlocal doing
        doing = text

    thread = threading.Thread(target=print_periodically, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        finished.set()
        thread.join()
