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
from econmt.memory.measure.storages import NodeLayers
from econmt_ops.core import scopes as accounting
from econmt_ops.dispatch.timing import synchronizer

if TYPE_CHECKING:
    from econmt.data.batching.batch import AnyBatch
    from econmt.engine.step import TrainingStep

_MARKED = 2
"""Number of steps timed by layer, the fastest of which counts: the first may find a cold machine."""


class Clock:
    """Time stamps of a device: of the program on a CPU, of the current stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, tuple[str, str] | None]] = []

    def begin(self, part: tuple[str, str] | None) -> None:
        """Assigns the time from now on to ``part``, a (phase, layer); None: to nothing."""
        if self._marks and self._marks[-1][1] == part:
            return
        if self._device.type == "cuda":
            stamp: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # The stream of the step's device; the current device may be another GPU.
            stamp.record(torch.cuda.current_stream(self._device))
        else:
            stamp = time.perf_counter()
        self._marks.append((stamp, part))

    def milliseconds(self) -> dict[tuple[str, str], float]:
        """Returns the milliseconds by (phase, layer)."""
        synchronizer(self._device)()
        spent: Counter[tuple[str, str]] = Counter()
        for (begin, part), (end, _) in pairwise(self._marks):
            if part is not None:
                on_gpu = self._device.type == "cuda"
                spent[part] += begin.elapsed_time(end) if on_gpu else 1000.0 * (end - begin)
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
