"""Times of each layer in each phase of a training step, and the device's peak rate."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from econmt.data.batching.batch import AnyBatch
from econmt.engine.step import TrainingStep
from econmt.memory.measure.tracker import NodeLayers
from econmt_ops.core import scopes as accounting

_MARKED = 2
"""Steps with marks between the layers, the quickest of which tells the shares: the first may find a cold machine."""


class _Clock:
    """Stamps on the time line of a device: of the program on the CPU, of the current stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, tuple[str, str] | None]] = []

    def begin(self, what: tuple[str, str] | None) -> None:
        """From now on the time is spent on ``what``, a (phase, layer); None: on nothing of interest."""
        if self._marks and self._marks[-1][1] == what:
            return
        if self._device.type == "cuda":
            stamp: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # The device's stream: that of the program may be another GPU's.
            stamp.record(torch.cuda.current_stream(self._device))
        else:
            stamp = time.perf_counter()
        self._marks.append((stamp, what))

    def milliseconds(self) -> dict[tuple[str, str], float]:
        """Milliseconds by (phase, layer)."""
        _synchronize(self._device)
        spent: Counter[tuple[str, str]] = Counter()
        for (begin, what), (end, _) in zip(self._marks, self._marks[1:]):  # noqa: B905 - pairs of neighbours
            if what is not None:
                spent[what] += (
                    begin.elapsed_time(end) if self._device.type == "cuda" else 1000.0 * (end - begin)
                )
        return dict(spent)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _nodes(value: Tensor) -> Iterator[Any]:
    """Every node of the graph that made a tensor."""
    seen = set()
    waiting = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            yield node


def time_step(
    step: TrainingStep, batch: AnyBatch, layers: Mapping[Tensor, str], repeats: int
) -> tuple[dict[tuple[str, str], float], float]:
    """Run training steps and time them.

    Args:
        step: the run's.
        batch: on the step's device.
        layers: of the parameters.
        repeats: steps without marks between layers, the quickest of which gives the seconds.

    Returns:
        Milliseconds by (phase, layer) of a step with marks between the layers, and seconds of a step without, which
        need not be what the milliseconds add up to.
    """
    tokens = step.tokens([batch])
    seconds = float("inf")
    for _ in range(repeats):
        step.clear()
        _synchronize(step.device)
        begin = time.perf_counter()
        step.run([batch], tokens)
        _synchronize(step.device)
        seconds = min(seconds, time.perf_counter() - begin)
    marked = [_time_layers(step, batch, tokens, layers) for _ in range(_MARKED)]
    return min(marked, key=lambda spent: sum(spent.values())), seconds


def _time_layers(
    step: TrainingStep, batch: AnyBatch, tokens: Tensor, layers: Mapping[Tensor, str]
) -> dict[tuple[str, str], float]:
    clock, nodes = _Clock(step.device), NodeLayers()
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
                node.register_prehook(lambda _gradients, what=(phase, layer): clock.begin(what))
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
    """Floating point operations a second that a large matrix product of this type reaches on a device."""
    size = 8192 if device.type == "cuda" else 768
    left = torch.rand(size, size, device=device).to(dtype)
    right = torch.rand(size, size, device=device).to(dtype)
    seconds = float("inf")
    with torch.no_grad():
        for _ in range(4):
            _synchronize(device)
            begin = time.perf_counter()
            torch.mm(left, right)
            _synchronize(device)
            seconds = min(seconds, time.perf_counter() - begin)
    return 2.0 * size**3 / seconds
