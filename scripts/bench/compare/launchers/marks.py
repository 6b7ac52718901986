"""Saving of models at given seconds of training, for the launchers of toolkits that count updates only.

``COMPARE_MARKS`` has the seconds, as in "60,120,240", and ``COMPARE_MARKS_FOLDER`` the folder of the models. Without
them a launcher changes nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch


class Marks:
    """Clock of training that saves the model at each mark, then stands still until the model is saved.

    Args:
        seconds: Marks in increasing order, from the first update on.
        folder: Folder that gets a folder for each mark, such as ``mark-60``.
    """

    def __init__(self, seconds: list[float], folder: Path) -> None:
        self._seconds, self._folder = seconds, folder
        self._began: float | None = None
        self._peak = 0

    @classmethod
    def from_environment(cls) -> Marks | None:
        """Returns the marks that this process has been given; None if there are none."""
        if "COMPARE_MARKS" not in os.environ:
            return None
        seconds = [float(word) for word in os.environ["COMPARE_MARKS"].split(",")]
        return cls(seconds, Path(os.environ["COMPARE_MARKS_FOLDER"]))

    def begin(self) -> None:
        """Starts the clock, when called for the first time."""
        if self._began is None:
            self._began = time.monotonic()
            print("first update begins", flush=True)

    def updated(self, update: int, save: Callable[[Path], object]) -> bool:
        """Saves the model into a new folder if a mark is reached; returns True if it was the last one."""
        assert self._began is not None
        if torch.cuda.is_available():
            # kept here, since a toolkit's log may begin to count anew
            self._peak = max(self._peak, torch.cuda.max_memory_allocated())
        if not self._seconds or time.monotonic() - self._began < self._seconds[0]:
            return not self._seconds
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        mark = self._seconds.pop(0)
        folder = self._folder / f"mark-{mark:g}"
        folder.mkdir(parents=True, exist_ok=True)
        save(folder)
        print(
            f"mark {mark:g}: {now - self._began:.2f} s, update {update}, {self._peak} bytes allocated, "
            f"saved in {time.monotonic() - now:.2f} s",
            flush=True,
        )
        self._began += time.monotonic() - now
        return not self._seconds
