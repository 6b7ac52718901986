"""Progress bars on stderr, only where someone is looking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich import progress
from rich.console import Console

_Item = TypeVar("_Item")
_STEP = 1000


def _bar(*columns: progress.ProgressColumn, show: bool, transient: bool) -> progress.Progress:
    console = Console(stderr=True)
    title = progress.TextColumn("{task.description}")
    disabled = not (show and console.is_terminal)
    return progress.Progress(title, *columns, console=console, transient=transient, disable=disabled)


def counted(
    title: str, items: Iterable[_Item], *, show: bool, unit: str = "pairs", step: int = _STEP
) -> Iterator[_Item]:
    """Pass pairs of text, or others, on and, if ``show`` and stderr is a terminal, say how many there have been."""
    number = progress.TextColumn("{task.completed:,.0f} " + unit)
    columns = (progress.SpinnerColumn(), number, progress.TimeElapsedColumn())
    with _bar(*columns, show=show, transient=True) as bar:
        task = bar.add_task(title, total=None)
        for count, item in enumerate(items, start=1):
            if count % step == 0:
                bar.update(task, completed=count)
            yield item


@contextmanager
def download_bar(title: str, total: int | None, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A function that is told how many more of ``total`` bytes (None: unknown) have arrived; see :func:`counted`."""
    columns = (
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with _bar(*columns, show=show, transient=False) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
