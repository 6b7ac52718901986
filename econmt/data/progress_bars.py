"""What is being done and how far it is, on stderr.

A bar or a line is gone when its work is done; standard output, where results go, is left alone. Where nobody looks,
what takes long is still told now and then.
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
    """Whether someone looks at stderr."""
    return Console(stderr=True).is_terminal


def _bar(*columns: progress.ProgressColumn, show: bool, transient: bool) -> progress.Progress:
    console = Console(stderr=True, highlight=False)
    title = progress.TextColumn("{task.description}")
    return progress.Progress(
        title,
        *columns,
        console=console,
        transient=transient,
        redirect_stdout=False,
        disable=not (show and console.is_terminal),
    )


class _Rate(progress.ProgressColumn):
    """How many a second, as far as that is known."""

    def render(self, task: progress.Task) -> str:
        """The rate of the last seconds."""
        speed = task.finished_speed or task.speed
        if speed is None:
            return ""
        return f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.1f}/s"


@contextmanager
def counting(
    title: str, total: int | None, unit: str, *, show: bool = True
) -> Iterator[Callable[[int], None]]:
    """A function that is told how many more of ``total`` things (None: unknown) are done, in plural a ``unit``."""
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


def counted(
    title: str, items: Iterable[_Item], *, show: bool, unit: str = "pairs", step: int = _STEP
) -> Iterator[_Item]:
    """Pass pairs of text, or others, on and, if ``show`` and stderr is a terminal, say how many there have been."""
    with counting(title, None, unit, show=show) as more:
        yield from told(items, more, step)


def told(items: Iterable[_Item], more: Callable[[int], None], step: int = _STEP) -> Iterator[_Item]:
    """Pass items on and tell a function of :func:`counting` of them, ``step`` at a time."""
    for number, item in enumerate(items, start=1):
        if number % step == 0:
            more(step)
        yield item


@contextmanager
def download_bar(title: str, total: int | None, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A function that is told how many more of ``total`` bytes (None: unknown) have arrived; see :func:`counted`."""
    columns = (
        progress.BarColumn(_BAR_WIDTH),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with _bar(*columns, show=show, transient=False) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


QUIET_SECONDS = 10.0
"""Where there is no terminal, what takes longer is told as often as that."""


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """A function that says what is being done: on a terminal in one line that the next text replaces, with its time.

    Elsewhere, such as in a pipe, in a line on standard error every :data:`QUIET_SECONDS`.
    """
    if not seen():
        with _told_now_and_then() as say:
            yield say
        return
    with _bar(progress.SpinnerColumn(), progress.TimeElapsedColumn(), show=True, transient=True) as bar:
        task = bar.add_task("", total=None, visible=False)
        yield lambda text: bar.update(task, description=escape(printable(text)), visible=True, refresh=True)


@contextmanager
def _told_now_and_then() -> Iterator[Callable[[str], None]]:
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
