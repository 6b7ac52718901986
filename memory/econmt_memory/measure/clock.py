"""Time stamps of a device."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """Time stamps of a device: of the program on a CPU, of the current stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, tuple[str, str] | None]] = []

    def begin(self, part: tuple[str, str] | None) -> None:
        """Assigns the time from now on to ``part``, a (phase, layer); None: to nothing."""
        if self._marks and self._marks[-1][1] == part:
            return
        stamp: Any = time.perf_counter()
        if self._device.type == "cuda":
            stamp = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stamp.record(torch.cuda.current_stream(self._device))
        self._marks.append((stamp, part))

    def milliseconds(self) -> dict[tuple[str, str], float]:
        """Returns the milliseconds by (phase, layer)."""
        spent: Counter[tuple[str, str]] = Counter()
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
        for (begin, part), (end, _) in pairwise(self._marks):
            if part is not None:
                spent[part] += begin.elapsed_time(end) if on_gpu else 1000.0 * (end - begin)
        return dict(spent)
