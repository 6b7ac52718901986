"""Times of each layer in each phase of a training step, and the device's peak rate."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from econmt.engine.devices import seconds_of, shortest_seconds
from econmt_memory.measure.storages import NodeLayers
from econmt_ops.core import scopes as accounting
from econmt_ops.dispatch.timing import synchronizer

if TYPE_CHECKING:
    from econmt.data.batching.batch import AnyBatch
    from econmt.engine.step import TrainingStep

_MARKED = 2
"""Number of steps timed by layer, the fastest of which counts: the first may find a cold machine."""


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
        synchronizer(self._device)()
        spent: Counter[tuple[str, str]] = Counter()
        on_gpu = self._device.type == "cuda"
        for (begin, part), (end, _) in pairwise(self._marks):
            if part is not None:
                spent[part] += begin.elapsed_time(end) if on_gpu else 1000.0 * (end - begin)
        if on_gpu:
            self._unused.extend(stamp for stamp, _ in self._marks)
            self._marks.clear()
        return dict(spent)


def _nodes(value: Tensor) -> Iterator[Any]:
    """Yields every node of a tensor's autograd graph."""
    seen = set()
    waiting = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            yield node


def time_step(
    step: TrainingStep, batch: AnyBatch, layers: Mapping[Tensor, str]
) -> tuple[dict[tuple[str, str], float], float]:
    """Runs training steps and times them.

    Returns:
        Milliseconds by (phase, layer) of a step that is timed by layer, and seconds of an undisturbed step, which the
        milliseconds need not add up to.
    """
    tokens = step.tokens([batch])
    step.clear()
    seconds = seconds_of(lambda: step.run([batch], tokens), step.device)
    marked = [_time_layers(step, batch, tokens, layers) for _ in range(_MARKED)]
    return min(marked, key=lambda spent: sum(spent.values())), seconds


def _time_layers(
    step: TrainingStep, batch: AnyBatch, tokens: Tensor, layers: Mapping[Tensor, str]
) -> dict[tuple[str, str], float]:
    clock, nodes = Clock(step.device), NodeLayers()
    nodes.add_parameters(layers)
    running = ""

    def enter(layer: str) -> None:
        if running == "forward":
            nodes.note(layer)
        clock.begin((running, layer if running == "forward" else nodes.running()))

    def watch(phase: str, value: Tensor | None) -> None:
        nonlocal running
        clock.begin(None)
        running = phase
        if value is not None:
            for node in _nodes(value):
                layer = nodes(node)
                node.register_prehook(lambda _gradients, part=(phase, layer): clock.begin(part))
        if phase == "forward":
            enter(accounting.current_layer())
        else:
            clock.begin((phase, "other"))

    step.clear()
    with accounting.watching(enter):
        step.run([batch], tokens, watch=watch)
    clock.begin(None)
    return clock.milliseconds()


@lru_cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measures the floating-point operations per second of a large matrix product of this type."""
    size = 8192 if device.type == "cuda" else 768
    left = torch.rand(size, size, device=device).to(dtype)
    right = torch.rand(size, size, device=device).to(dtype)
    with torch.no_grad():
        return 2.0 * size**3 / shortest_seconds(lambda: torch.mm(left, right), device, repeats=3)
