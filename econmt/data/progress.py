"""Progress bars on stderr, only where someone is looking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import rich.progress
from rich.console import Console

_Item = TypeVar("_Item")
_STEP = 1000


class Progress:
    """Bars for long passes over text; silent unless asked for and stderr is a terminal."""

    def __init__(self, show: bool) -> None:
        self._console = Console(stderr=True)
        self.visible = show and self._console.is_terminal

    def count(self, title: str, items: Iterable[_Item]) -> Iterator[_Item]:
        """Pass ``items`` on and show how many there have been."""
        if not self.visible:
            yield from items
            return
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("{task.completed:,.0f} pairs"),
            rich.progress.TimeElapsedColumn(),
        )
        with rich.progress.Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(title, total=None)
            for number, item in enumerate(items, start=1):
                if number % _STEP == 0:
                    bar.update(task, completed=number)
                yield item

    def download(self, title: str, total: int | None) -> DownloadBar:
        """A bar for ``total`` bytes (None: unknown)."""
        return DownloadBar(self._console, title, total, self.visible)


class DownloadBar:
    """A bar of bytes, shown until it is closed."""

    def __init__(self, console: Console, title: str, total: int | None, visible: bool) -> None:
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
            disable=not visible,
        )
        self._task = self._bar.add_task(title, total=total)

        self._bar.start()

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.stop()

    def advance(self, count: int) -> None:
        """``count`` more bytes have arrived."""
        self._bar.update(self._task, advance=count)
