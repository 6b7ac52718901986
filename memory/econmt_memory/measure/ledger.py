"""The ledger: the bytes and milliseconds of a training step by layer, category and phase.

A Tracker observes one whole step: forward pass, backward pass and the optimizer's update. A storage is a *feature map*
if the forward pass creates it and autograd keeps it for the backward pass; it counts once, for the layer that keeps it
first. Other storages that the step creates are *workspace*, and those that existed before it, such as the batch, are
*other*, unless they hold weights, gradients or optimizer state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from econmt_memory.measure.storages import UNKNOWN, Beginning, MemoryRecord, Storage

LAYERS = ("embedding", "encoder", "attention", "decoder", "output", "loss", "exchange", "other")
"""Layers of a model; "exchange" stands for buffers of communication between ranks."""

CATEGORIES = {
    "feature maps": "what autograd keeps of the forward pass for the backward pass",
    "weights": "parameters and buffers",
    "gradients": "sums that the backward pass leaves in parameters",
    "optimizer state": "what the optimizer keeps from step to step, such as moments",
    "workspace": "all else that the step allocates, such as results that nobody keeps",
    "other": "what was there before the step, such as the batch",
}
"""Categories of bytes, and what they mean."""

_Key = TypeVar("_Key")

LARGEST = 20
"""Number of the largest storages at the peak that a ledger lists."""


class TensorAtPeak(NamedTuple):
    """Storage that is alive at the peak, with the operator that created it."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    layer: str
    operator: str
    line: str = ""


class Moment(NamedTuple):
    """Live bytes at a moment of a step."""

    milliseconds: float
    bytes: int
    phase: str


class OutsideMemory(NamedTuple):
    """Bytes of a GPU that a process takes outside of PyTorch's allocator.

    Attributes:
        context: CUDA's context with the stacks of all threads.
        libraries: Kernels of PyTorch and cuBLAS, after their first use.
        kernels: Everything since: kernels of Triton and cuDNN, further ones of cuBLAS, CUDA graphs.
    """

    context: int
    libraries: int
    kernels: int

    @property
    def total(self) -> int:
        """All bytes outside of the allocator."""
        return sum(self)


@dataclass
class Ledger:
    """Bytes and times of one training step.

    Attributes:
        peak: Most live bytes.
        entries: Live bytes at the peak by (category, layer); their sum is ``peak``.
        stash: Bytes of feature maps kept at the end of the forward pass, by layer.
        timeline: Live bytes over the step, one point per change.
        largest: Largest storages alive at the peak, largest first.
        milliseconds: Milliseconds by (phase, layer), which add up to ``seconds``; empty in an estimate.
        rank: Rank whose step it is, such as "rank 0 of 2"; empty for a single process.
        tokens: Target tokens of the step.
        flops: Floating-point operations of the step's matrix products, including recomputed ones.
        seconds: Seconds of the whole step; 0 if it was not timed.
        device: "cpu" or "cuda".
        peak_flops_per_second: Rate of a large matrix product in the step's precision; None if unknown.
        allocated, reserved: Peaks of CUDA's caching allocator, measured or, in an estimate, simulated; None on a CPU.
        graphs: Bytes of the step's CUDA graph outside of the allocator; None if it was not captured.
        outside: Bytes of the device outside of the allocator, measured or, in an estimate, assumed; None on a CPU.
        order: Layers in the order of tables.
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
    outside: OutsideMemory | None = None
    order: Sequence[str] = LAYERS

    @property
    def layers(self) -> list[str]:
        """Layers with bytes at the peak, in the order of tables; those that are not in the order come last."""
        return self.ordered(name for (_, name), size in self.entries.items() if size)

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Returns different names of layers in the order of tables."""
        used, order = dict.fromkeys(names), dict.fromkeys(self.order)
        return [*(name for name in order if name in used), *(name for name in used if name not in order)]

    def category(self, category: str) -> int:
        """Returns the bytes of a category at the peak, over all layers."""
        return sum(size for (kind, _), size in self.entries.items() if kind == category)

    def by_layer(self) -> Counter[str]:
        """Returns the bytes at the peak by layer, over all categories."""
        return summed((name, size) for (_, name), size in self.entries.items())

    @property
    def stashed(self) -> int:
        """Bytes of feature maps kept at the end of the forward pass."""
        return sum(self.stash.values())

    @property
    def share_of_peak(self) -> float | None:
        """Rate of the step as a share of the device's peak rate; None if either is unknown."""
        is_known = self.seconds and self.peak_flops_per_second
        return self.flops / self.seconds / self.peak_flops_per_second if is_known else None  # type: ignore[operator]

    def take(self, seconds: float) -> None:
        """Sets the seconds of the step, and scales the times by layer and those of the timeline accordingly.

        The step that was timed by layer is slower than an undisturbed one or a graph, so it gives shares only.
        """
        marked = sum(self.milliseconds.values())
        factor = 1000.0 * seconds / marked if marked else 1.0
        self.milliseconds = {what: factor * spent for what, spent in self.milliseconds.items()}
        self.timeline = [each._replace(milliseconds=factor * each.milliseconds) for each in self.timeline]
        self.seconds = seconds

    def phase(self, phase: str) -> float:
        """Returns the milliseconds of a phase, over all layers."""
        return sum(value for (name, _), value in self.milliseconds.items() if name == phase)


def summed(sizes: Iterable[tuple[_Key, Any]]) -> Counter[_Key]:
    """Returns the sum of the sizes of each key."""
    sums: Counter[_Key] = Counter()
    for key, size in sizes:
        sums[key] += size
    return sums


def ledger_of(tracker: MemoryRecord, *, at_end: bool = False) -> Ledger:
    """Returns the ledger of a step that a tracker has observed; its entries are those of the peak, or of the end."""
    tracker.settle()
    alive = tracker.alive(len(tracker.changes) if at_end else tracker.peak()[1])
    entries = summed((kind_of(storage), size) for storage, size in alive.items())
    ledger = Ledger(entries.total(), entries)
    ledger.flops, ledger.device = sum(tracker.flops.values()), tracker.device.type
    alive.pop(UNKNOWN, None)
    for storage in sorted(alive, key=alive.__getitem__, reverse=True)[:LARGEST]:
        dtype = str(storage.dtype).removeprefix("torch.")
        what = storage.shape, dtype, *kind_of(storage), storage.operator, storage.line
        ledger.largest.append(TensorAtPeak(alive[storage], *what))
    for begin in tracker.begins:
        if begin.phase == "backward":
            kinds = ((kind_of(storage), size) for storage, size in tracker.alive(begin.changes).items())
            stash = summed((layer, size) for (category, layer), size in kinds if category == "feature maps")
            ledger.stash = max(ledger.stash, stash, key=Counter.total)
    ledger.timeline = _timeline(tracker)
    return ledger


def _timeline(tracker: MemoryRecord) -> list[Moment]:
    """Returns a point at the beginning of each phase, one after each change, and one at the end."""
    live = list(tracker.live())
    ends = [*tracker.begins, Beginning("", tracker.seconds, len(tracker.changes))]
    points = []
    for begin, end in pairwise(ends):
        points.append(Moment(1000.0 * begin.seconds, live[begin.changes], begin.phase))
        numbers = range(begin.changes, end.changes)
        points += [Moment(1000.0 * tracker.changes[at].seconds, live[at + 1], begin.phase) for at in numbers]
    return [*points, Moment(1000.0 * tracker.seconds, live[-1], tracker.phase())]


def kind_of(storage: Storage) -> tuple[str, str]:
    """Returns the category and the layer of a storage."""
    if storage.category is not None:
        return storage.category, storage.layer
    if not storage.operator:
        return "other", "other"
    if storage.kept_by is not None:
        return "feature maps", storage.kept_by
    return "workspace", storage.layer
