"""Measures the bytes and the times of a training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from econmt.data.batching.batch import AnyBatch
from econmt.engine.devices import seconds_of, shortest_seconds
from econmt.engine.step import TrainingStep
from econmt_memory.measure import scopes
from econmt_memory.measure.clock import Clock
from econmt_memory.measure.ledger import Ledger, ledger_of
from econmt_memory.measure.storages import BLOCK, PHASES, NodeLayers
from econmt_memory.measure.tracker import Tracker
from econmt_ops.dispatch.capture import release_workspaces

_MARKED = 2
"""Number of steps timed by layer, the fastest of which counts: the first may find a cold machine."""


def measure_step(
    step: TrainingStep, batch: AnyBatch, *, accumulating: bool = False, timed: bool = True
) -> Ledger:
    """Runs a training step several times, and measures its bytes and times.

    An optimizer without state gets it first, since only the first step of a run lacks it. Bytes and times are measured
    in different passes, because tracking takes time. Afterwards parameters, buffers, optimizer and random states are
    restored; gradients are cleared.

    On a GPU, the bytes are those of the caching allocator, including memory that operators use internally; bytes that
    belong to no tensor of the step (cuBLAS's workspace, other models) are "other". Functions compiled by torch.compile
    run uncompiled while bytes are tracked.

    An ``accumulating`` step adds to existing gradients, as all but the first batch of an update.
    """
    device, batch = step.device, batch.to(step.device)

    def read_allocator() -> tuple[int, int]:
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device), peak

    with _restored(step):
        step.prepare()
        tracker = Tracker(device)
        if device.type == "cuda":
            release_workspaces()
            torch.cuda.empty_cache()
            tracker = Tracker(device, block=BLOCK, meter=read_allocator)
        ledger = track_step(tracker, step, batch, accumulating=accumulating)
        if device.type == "cuda":
            ledger.allocated, ledger.reserved = ledger.peak, torch.cuda.memory_reserved(device)
        if timed:
            tokens, layers = step.tokens([batch]), _layers(step)
            step.clear()
            seconds = seconds_of(lambda: step.run([batch], tokens), device)
            marked = [_time_layers(step, batch, tokens, layers) for _ in range(_MARKED)]
            ledger.milliseconds = min(marked, key=lambda spent: sum(spent.values()))
            ledger.peak_flops_per_second = peak_flops(device, tracker.flops.most_common(1)[0][0])
            _scale(ledger)
            ledger.take(seconds)  # of an undisturbed step, which the milliseconds need not add up to
    return ledger


def track_step(
    tracker: Tracker, step: TrainingStep, batch: AnyBatch, *, accumulating: bool = False
) -> Ledger:
    """Runs one training step on real or fake tensors and returns the ledger of its bytes; restores nothing.

    The optimizer has its state. An ``accumulating`` step adds to existing gradients, which are created here.
    """
    in_graphs = step.device.type == "cuda" and step.task.recipe.training.in_graphs

    def begin(phase: str) -> None:
        if phase == "backward" and in_graphs:
            release_workspaces()  # as a captured step does, since the backward pass has its own thread
        tracker.begin(phase)

    step.clear()
    tokens = step.tokens([batch])
    layers = _layers(step)
    tracker.nodes.add_parameters(layers)
    for parameter in step.model.parameters():
        tracker.label(parameter, "weights", layers[parameter])
    for parameter in step.parameters if accumulating else ():
        parameter.grad = torch.zeros_like(parameter)
        tracker.label(parameter.grad, "gradients", layers[parameter])
    _label_state(tracker, step, layers)

    def label(parameter: Tensor) -> None:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            tracker.label(parameter.grad, "gradients", layers[parameter])

    if step.backward_updates is not None:
        step.backward_updates.watch = label
    with tracker.recording():
        applies = not accumulating
        step.gradient([batch], tokens, on_phase=lambda phase, _: begin(phase), adds=True, applies=applies)
        step.update()
        for parameter in step.parameters:
            gradient, layer = parameter.grad, layers[parameter]
            if gradient is not None:
                tracker.label(gradient._values() if gradient.is_sparse else gradient, "gradients", layer)
        _label_state(tracker, step, layers)
    if step.backward_updates is not None:
        step.backward_updates.watch = None
    ledger = ledger_of(tracker)
    ledger.tokens = batch.target_tokens
    return ledger


def _layers(step: TrainingStep) -> dict[Tensor, str]:
    """Returns the layers of the model's parameters, and of the step's slices of them."""
    names = step.task.layers(step.model)
    parameters = [*step.model.named_parameters(), *step.named_parameters()]
    return {parameter: names[name] for name, parameter in parameters}


def _label_state(tracker: Tracker, step: TrainingStep, layers: dict[Tensor, str]) -> None:
    for parameter, state in step.optimizer.state.items():
        for part in state.values():
            tracker.label(part, "optimizer state", layers.get(parameter, "other"))


@contextmanager
def _restored(step: TrainingStep) -> Iterator[None]:
    """Restores parameters, buffers, optimizer and random states after the context, and clears the gradients."""
    tensors = [*step.model.parameters(), *step.model.buffers()]
    had_state = bool(step.optimizer.state)
    for state in step.optimizer.state.values():
        tensors += state.values()
    # The copies are on the CPU, so that they take no GPU memory.
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    with torch.random.fork_rng(devices=[step.device] if step.device.type == "cuda" else []):
        try:
            yield
        finally:
            step.clear()
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)
            if not had_state:
                step.optimizer.state.clear()


def _scale(ledger: Ledger) -> None:
    """Scales the phases of the timeline, which tracking has slowed down, to the times measured without tracking."""
    points = ledger.timeline
    first = {moment.phase: moment.milliseconds for moment in reversed(points)}
    ends = (first["backward"], first["optimizer"], points[-1].milliseconds)
    now, scaled = 0.0, []
    for phase, end in zip(PHASES, ends, strict=True):
        factor = ledger.phase(phase) / (end - first[phase])
        for point in points:
            if point.phase == phase:
                stamp = now + factor * (point.milliseconds - first[phase])
                scaled.append(point._replace(milliseconds=stamp))
        now += ledger.phase(phase)
    ledger.timeline = scaled


def _time_layers(
    step: TrainingStep, batch: AnyBatch, tokens: Tensor, layers: Mapping[Tensor, str]
) -> dict[tuple[str, str], float]:
    """Runs a training step and returns its milliseconds by phase and layer."""
    clock, nodes = Clock(step.device), NodeLayers()
    nodes.add_parameters(layers)
    running = ""

    def enter(layer: str) -> None:
        if running == "forward":
            nodes.note(layer)
        clock.begin((running, layer if running == "forward" else nodes.running()))

    def on_phase(phase: str, value: Tensor | None) -> None:
        nonlocal running
        clock.begin(None)
        running = phase
        if value is not None:
            for node in _nodes(value):
                layer = nodes(node)
                node.register_prehook(lambda _gradients, part=(phase, layer): clock.begin(part))
        if phase == "forward":
            enter(scopes.current_layer())
        else:
            clock.begin((phase, "other"))

    step.clear()
    with scopes.watching(enter):
        step.run([batch], tokens, on_phase=on_phase)
    clock.begin(None)
    return clock.milliseconds()


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


@lru_cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measures the floating-point operations per second of a large matrix product of this type."""
    size = 8192 if device.type == "cuda" else 768
    left = torch.rand(size, size, device=device).to(dtype)
    right = torch.rand(size, size, device=device).to(dtype)
    with torch.no_grad():
        return 2.0 * size**3 / shortest_seconds(lambda: torch.mm(left, right), device, repeats=3)
