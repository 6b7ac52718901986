"""Time stamps of a device."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import Any

import torch

_EVENTS: dict[int | None, list[Any]] = {}
"""Events that have been read and can be recorded again, by GPU."""


class Clock:
    """Time stamps of a device: of the program on a CPU, of the current stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = (
            torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        )
        self._unused = _EVENTS.setdefault(self._index, [])
        self._marks: list[tuple[Any, tuple[str, str] | None]] = []
        self._streams: dict[int, torch.cuda.Stream] = {}

    def begin(self, part: tuple[str, str] | None) -> None:
        """Assigns the time from now on to ``part``, a (phase, layer); None: to nothing."""
        if self._marks and self._marks[-1][1] == part:
            return
        if self._device.type == "cuda":
            # Less than half of the time that torch.cuda.Event takes, which is much beside that of a small operator.
            stamp: Any = self._unused.pop() if self._unused else torch._C._CudaEventBase(enable_timing=True)
            stamp.record(self._stream())
        else:
            stamp = time.perf_counter()
        self._marks.append((stamp, part))

    def _stream(self) -> torch.cuda.Stream:
        """Returns the current stream of the step's device; the current device may be another GPU."""
        address = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = torch.cuda.current_stream(self._device)
        return stream

    def milliseconds(self) -> dict[tuple[str, str], float]:
        """Returns the milliseconds by (phase, layer), and gives back the stamps, so that it can be called once."""
        spent: Counter[tuple[str, str]] = Counter()
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
        for (begin, part), (end, _) in pairwise(self._marks):
            if part is not None:
                spent[part] += begin.elapsed_time(end) if on_gpu else 1000.0 * (end - begin)
        if on_gpu:
            self._unused.extend(stamp for stamp, _ in self._marks)
            self._marks.clear()
        return dict(spent)
