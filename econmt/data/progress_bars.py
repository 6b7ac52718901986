"""Progress bars and status lines on stderr, which disappear when the work is done; stdout is for results.

Without a terminal, the current activity is printed from time to time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich import progress
from rich.console import Console
from rich.markup import escape

from econmt import errors
from econmt.data.files import notice
from econmt.errors import printable

Say = Callable[[str], object]
"""Function that shows the progress."""

_Item = TypeVar("_Item")
_STEP = 1000
_BAR_WIDTH = 20

QUIET_SECONDS = 10.0
"""Seconds between two status lines if stderr is not a terminal."""


def seen() -> bool:
    """Returns True if stderr is a terminal and shows progress."""
    return Console(stderr=True).is_terminal and not errors.quiet


def _bar(*columns: progress.ProgressColumn, show: bool, transient: bool) -> progress.Progress:
    console = Console(stderr=True, highlight=False)
    columns = progress.TextColumn("{task.description}"), *columns
    hidden = not (show and seen())
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
    """Shows a bar of ``total`` items (None: unknown), named ``unit``; yields a function that advances it.

    Without a terminal, the number so far is printed every :data:`QUIET_SECONDS`.
    """
    if show and not seen():
        done, of = 0, "" if total is None else f" of {total:,}"

        def advance(count: int) -> None:
            nonlocal done
            done += count
            heartbeat.say(f"{title}: {done:,}{of} {unit}")

        heartbeat = Heartbeat(QUIET_SECONDS)
        heartbeat.say(title)
        with heartbeat:
            yield advance
        return
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


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the current activity: on a terminal in one line that is replaced by the next.

    Without a terminal, the latest activity is printed every :data:`QUIET_SECONDS`.
    """
    if not seen():
        with Heartbeat(QUIET_SECONDS) as heartbeat:
            yield heartbeat.say
        return
    with _bar(progress.SpinnerColumn(), progress.TimeElapsedColumn(), show=True, transient=True) as bar:
        task = bar.add_task("", total=None, visible=False)
        yield lambda text: bar.update(task, description=escape(printable(text)), visible=True, refresh=True)


class Heartbeat:
    """Prints the current activity on stderr whenever ``seconds`` have passed without a line, while it is entered.

    An activity that was printed last already is printed again only after twice as long each time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._doing, self._told, self._wait = seconds, "working", "", seconds
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self.spoke()

    def say(self, text: str) -> None:
        """Sets the current activity."""
        self._doing = text

    def spoke(self) -> None:
        """Notes that a line was printed just now."""
        self._last = time.monotonic()

    def _beat(self) -> None:
        while not self._finished.wait(self._seconds - (time.monotonic() - self._last) % self._seconds):
            if self._doing != self._told:
                self._told, self._wait = self._doing, self._seconds
            if time.monotonic() - self._last >= self._wait:
                self._wait *= 2.0
                notice(self._doing)
                self.spoke()

    def __enter__(self) -> Heartbeat:  # noqa: PYI034  typing.Self is newer than Python 3.10
        self.spoke()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._finished.set()
        self._thread.join()
