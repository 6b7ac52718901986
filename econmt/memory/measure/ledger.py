"""The ledger: where every byte and every millisecond of a training step is, measured.

Bytes come from a Tracker over one whole step: forward pass, backward pass and the
optimizer's update. A storage is a *feature map* if autograd keeps it for the backward pass and the forward pass made
it; it counts once, for the layer that kept it first. Parameters never are feature maps, and what the step makes and
nobody keeps is *workspace*. What was there before the step (the batch) is *other*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.data.batching.batch import AnyBatch
from econmt.engine.step import TrainingStep
from econmt.memory.measure.layer_times import peak_flops, time_step
from econmt.memory.measure.tracker import BLOCK, PHASES, Beginning, Storage, Tracker
from econmt_ops.dispatch.capture import release_workspaces

LAYERS = ("embedding", "encoder", "attention", "decoder", "output", "loss", "exchange", "other")
"""Layers of a model; "exchange" holds buffers of communication between ranks."""


CATEGORIES = ("feature maps", "weights", "gradients", "optimizer state", "workspace", "other")
LARGEST = 20
"""Number of the largest storages at the peak that a ledger lists."""


class TensorAtPeak(NamedTuple):
    """A storage alive at the peak: its bytes, shape and dtype, what it is for, and the operator that made it."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    layer: str
    operator: str


class Moment(NamedTuple):
    """Live bytes at a moment of a step."""

    milliseconds: float
    bytes: int
    phase: str


@dataclass
class Ledger:
    """The account of one training step.

    Attributes:
        peak: bytes alive at the peak, everything included.
        entries: bytes alive at the peak by (category, layer); absent means none. Their sum is ``peak``.
        stash: by layer, bytes of feature maps kept at the end of the forward pass.
        timeline: live bytes over the step, a point a change; in an estimate, which has no times, a change counts as a
            millisecond.
        largest: the largest storages alive at the peak, largest first.
        milliseconds: by (phase, layer), which add up to ``seconds``; empty in an estimate.
        rank: whose step it is, as "rank 0 of 2"; empty: there is one process.
        tokens: target tokens of the step.
        flops: floating point operations of the step's matrix products, recomputed ones included.
        seconds: of the whole step, 0 if it was not timed.
        device: "cpu" or "cuda".
        peak_flops_per_second: what the device can do in the precision of the step; None if unknown.
        graphs: bytes that the step's CUDA graph takes outside of the allocator; None: it was not captured.
        allocated, reserved: the peaks of CUDA's caching allocator, measured or, in an estimate, simulated; None on
            the CPU, which has none.
        process: resident bytes of the process that ran the step, by part, after it, see
            `econmt.memory.measure.process.resident_parts`; empty in an estimate and where the system does not tell.
        process_peak: the most that were resident so far; 0 if unknown.
    """

    peak: int = 0
    entries: Counter[tuple[str, str]] = field(default_factory=Counter)
    stash: Counter[str] = field(default_factory=Counter)
    timeline: list[Moment] = field(default_factory=list)
    largest: list[TensorAtPeak] = field(default_factory=list)
    milliseconds: dict[tuple[str, str], float] = field(default_factory=dict)
    rank: str = ""
    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0
    device: str = "cpu"
    peak_flops_per_second: float | None = None
    allocated: int | None = None
    reserved: int | None = None
    graphs: int | None = None
    process: dict[str, int] = field(default_factory=dict)
    process_peak: int = 0

    def category(self, category: str) -> int:
        """Bytes of one category at the peak, over all layers."""
        return sum(size for (kind, _), size in self.entries.items() if kind == category)

    def layer(self, layer: str) -> int:
        """Bytes of one layer at the peak, over all categories."""
        return sum(size for (_, name), size in self.entries.items() if name == layer)

    @property
    def total(self) -> int:
        """The sum of all entries, which is the peak."""
        return sum(self.entries.values())

    @property
    def stashed(self) -> int:
        """Bytes of feature maps kept at the end of the forward pass."""
        return sum(self.stash.values())

    @property
    def tokens_per_second(self) -> float | None:
        """Target tokens a second; None if the step was not timed."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def flops_per_second(self) -> float | None:
        """Floating point operations a second; None if the step was not timed."""
        return self.flops / self.seconds if self.seconds else None

    @property
    def share_of_peak(self) -> float | None:
        """Returns the step's share of the device's peak rate, or None if either is unknown."""
        done = self.flops_per_second
        return (
            None if done is None or self.peak_flops_per_second is None else done / self.peak_flops_per_second
        )

    def take(self, seconds: float) -> None:
        """Say how long the step takes; the times by layer, and those of the timeline, become shares of that.

        A step with marks between its layers is slower than one without, above all where others need the machine or a
        graph replays it: what it tells is which share of the time is whose.
        """
        marked = sum(self.milliseconds.values())
        factor = 1000.0 * seconds / marked if marked else 1.0
        self.milliseconds = {what: factor * spent for what, spent in self.milliseconds.items()}
        self.timeline = [
            moment._replace(milliseconds=factor * moment.milliseconds) for moment in self.timeline
        ]
        self.seconds = seconds

    def phase(self, phase: str) -> float:
        """Milliseconds of one phase, over all layers."""
        return sum(value for (name, _), value in self.milliseconds.items() if name == phase)


def measure_step(
    step: TrainingStep, batch: AnyBatch, *, accumulating: bool = False, timed: bool = True, repeats: int = 1
) -> Ledger:
    """Run a training step of a run that is under way, several times, and account for what it takes.

    An optimizer without state gets it first: only the first step of a run finds none. Bytes and times are measured in
    different passes, so that following the bytes costs no time. Afterwards the parameters, the buffers, the optimizer
    and the random states are as they were; gradients are cleared.

    On a GPU the bytes are those that the caching allocator has given out, what operators use and give back inside
    included; bytes that are no tensor of the step (cuBLAS's workspace, other models) are "other". Functions compiled
    by torch.compile run uncompiled while bytes are followed.

    Args:
        step: of the run.
        batch: from which it computes.
        accumulating: count a step that finds gradients to add to, as every batch of an update but its first one.
        timed: measure times too.
        repeats: how many whole steps are run for ``seconds``, which is the quickest of them.
    """
    device, batch = step.device, batch.to(step.device)
    with _put_back(step):
        step.prepare()
        tracker = Tracker(device)
        if device.type == "cuda":
            release_workspaces()
            torch.cuda.empty_cache()
            tracker = Tracker(device, block=BLOCK, meter=lambda: _read_allocator(device))
        ledger = track_step(tracker, step, batch, accumulating=accumulating)
        if device.type == "cuda":
            ledger.allocated, ledger.reserved = ledger.peak, torch.cuda.memory_reserved(device)
        if timed:
            ledger.milliseconds, seconds = time_step(step, batch, _layers(step), repeats)
            ledger.peak_flops_per_second = peak_flops(device, tracker.precision)
            _scale(ledger)
            ledger.take(seconds)
    return ledger


def track_step(
    tracker: Tracker, step: TrainingStep, batch: AnyBatch, *, accumulating: bool = False
) -> Ledger:
    """Run one training step, on real or fake tensors, and account for its bytes; it changes what it changes.

    Args:
        tracker: follows the bytes.
        step: whose optimizer has its state.
        batch: on the step's device.
        accumulating: there are gradients already, to add to.
    """
    in_graphs = step.device.type == "cuda" and step.task.recipe.training.in_graphs

    def begin(phase: str) -> None:
        if phase == "backward" and in_graphs:
            release_workspaces()  # as a step does that is captured: the backward pass has a thread of its own
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
    with tracker.recording():
        step.add_gradient([batch], tokens, watch=lambda phase, _: begin(phase))
        step.update()
        for parameter in step.parameters:
            gradient, layer = parameter.grad, layers[parameter]
            if gradient is not None:
                tracker.label(gradient._values() if gradient.is_sparse else gradient, "gradients", layer)
        _label_state(tracker, step, layers)
    ledger = ledger_of(tracker)
    ledger.tokens = batch.target_tokens
    return ledger


def ledger_of(tracker: Tracker) -> Ledger:
    """The ledger of what a tracker has seen, all phases of a step."""
    peak, moment = tracker.peak()
    ledger = Ledger(peak=peak, flops=sum(tracker.flops.values()), device=tracker.device.type)
    alive = tracker.alive(moment)
    for storage, size in alive.items():
        ledger.entries[_kind(storage)] += size
    if tracker.unknown:
        ledger.entries["other", "other"] += tracker.unknown
    hidden = tracker.hidden.get(moment)
    if hidden is not None:
        ledger.entries["workspace", hidden.layer] += hidden.size
        inside = TensorAtPeak(
            hidden.size, (hidden.size,), "uint8", "workspace", hidden.layer, hidden.operator
        )
        ledger.largest.append(inside)
    for storage in sorted(alive, key=alive.__getitem__, reverse=True)[:LARGEST]:
        category, layer = _kind(storage)
        dtype = str(storage.dtype).removeprefix("torch.")
        ledger.largest.append(
            TensorAtPeak(alive[storage], storage.shape, dtype, category, layer, storage.operator)
        )
    ledger.largest = sorted(ledger.largest, key=itemgetter(0), reverse=True)[:LARGEST]
    for storage, size in tracker.alive(tracker.begins["backward"].changes).items():
        category, layer = _kind(storage)
        if category == "feature maps":
            ledger.stash[layer] += size
    ledger.timeline = _timeline(tracker)
    return ledger


def _timeline(tracker: Tracker) -> list[Moment]:
    """A point at the beginning of each phase, one after each change, and one at the end."""
    live = list(tracker.live())
    ends = [*tracker.begins.values(), Beginning(tracker.seconds, len(tracker.changes))]
    points = []
    for (phase, begin), end in zip(tracker.begins.items(), ends[1:], strict=True):
        points.append(Moment(1000.0 * begin.seconds, live[begin.changes], phase))
        points += [
            Moment(1000.0 * tracker.changes[number].seconds, live[number + 1], phase)
            for number in tracker.numbers(begin.changes, end.changes)
        ]
    return [*points, Moment(1000.0 * tracker.seconds, live[-1], PHASES[-1])]


def _kind(storage: Storage) -> tuple[str, str]:
    """Category and layer of a storage."""
    if storage.category is not None:
        return storage.category, storage.layer
    if not storage.operator:
        return "other", "other"
    if storage.kept_by is not None:
        return "feature maps", storage.kept_by
    return "workspace", storage.layer


def _layers(step: TrainingStep) -> dict[Tensor, str]:
    """By parameter, and by what the step has of it."""
    names = step.task.layers(step.model)
    parameters = chain(step.model.named_parameters(), step.named_parameters())
    return {parameter: names[name] for name, parameter in parameters}


def _label_state(tracker: Tracker, step: TrainingStep, layers: dict[Tensor, str]) -> None:
    for parameter, state in step.optimizer.state.items():
        for part in state.values():
            tracker.label(part, "optimizer state", layers.get(parameter, "other"))


@contextmanager
def _put_back(step: TrainingStep) -> Iterator[None]:
    """Put parameters, buffers, the optimizer's state and the random states back; clear the gradients."""
    tensors = [*step.model.parameters(), *step.model.buffers()]
    had_state = bool(step.optimizer.state)
    for state in step.optimizer.state.values():
        tensors += state.values()
    # On the CPU, where copies of a GPU's tensors are in nobody's way.
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


def _read_allocator(device: torch.device) -> tuple[int, int]:
    """Bytes that CUDA's allocator has given out, now and at most since the last call."""
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device), peak


def _scale(ledger: Ledger) -> None:
    """Stretch the timeline's phases, which following the bytes made longer, to the times measured without."""
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
