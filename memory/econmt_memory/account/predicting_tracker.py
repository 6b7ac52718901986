"""Tracker of a program's step on fake tensors, which simulates the memory of a GPU or of a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from econmt_memory.estimate.allocator import CachingAllocator
from econmt_memory.measure.allocations import OUTSIDE
from econmt_memory.measure.patches import patched
from econmt_memory.measure.scopes import current_layer
from econmt_memory.measure.storages import Storage
from econmt_memory.measure.tracker import Tracker


class PredictingTracker(Tracker):
    """Tracker of a program's step on fake tensors, which tells by itself which phase the step is in.

    It may run several steps and record the last one. It sees all that operators read and make, so that hooks of modules
    need not tell it.

    Args:
        allocator: Simulated allocator of a GPU, whose blocks give the sizes; None on a CPU, where sizes are those
            of the tensors.
        settings: Arguments of :class:`econmt_memory.measure.tracker.Tracker`.
    """

    _updating = False

    def __init__(self, allocator: CachingAllocator | None, **settings: Any) -> None:
        super().__init__(torch.device("cpu"), **settings)  # type: ignore[no-untyped-call]
        self.allocator = allocator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper, which calls operators of its parts
        # All tensors are fake below here, so that the mode that replaces real ones would only take time.
        with torch._C.DisableTorchFunction():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def update(self, *, elementwise: bool = False) -> None:  # noqa: ARG002
        """Notes that an optimizer's step begins or ends; its operators are recorded in any case."""
        self._updating = not self._updating
        if self._updating:
            self.begin("optimizer")

    def use(self, _: Any) -> None:
        """Does nothing; see the class."""

    made = use

    def phase(self) -> str:
        """Returns the current phase, and begins it if it is another one than before."""
        in_backward = torch._C._current_graph_task_id() >= 0
        phase = self.phase_of(current_layer(), updating=self._updating, in_backward=in_backward)
        if not self.begins or self.begins[-1].phase != phase:
            self.begin(phase)
        return phase

    def random_state(self) -> Tensor:
        """Returns the state of random numbers, which activation checkpointing keeps; a CPU's counts."""
        state = torch.random.get_rng_state()
        if self.allocator is None and not self._inside:
            with torch._C.DisableTorchFunction():
                storage = self._register(state, OUTSIDE, self.nodes.running())
            self._change(storage, storage.size)
        return state

    def resizing(self) -> AbstractContextManager[None]:
        """Follows storages that are resized by no operator, as fully_shard does."""
        resize = torch.UntypedStorage.resize_

        def followed(memory: torch.UntypedStorage, size: int) -> None:
            resize(memory, size)
            if memory._cdata in self._known:
                self._update(memory)

        return patched(torch.UntypedStorage, resize_=followed)

    def start_over(self) -> None:
        """Forgets what has been tracked; storages that are alive count as there before."""
        for records in (self.changes, self.begins, self.flops):
            records.clear()
        self.before = [(storage, storage.size) for storage, _ in self._known.values()]
        for storage, _ in self.before:
            named = storage.layer if storage.category == "workspace" else ""  # by a library that keeps it
            storage.operator, storage.kept_by, storage.line = named, None, ""
        if self.allocator is not None:
            self.allocator.peak_allocated = self.allocator.allocated

    def find(self, tensor: Tensor) -> Storage:
        """Returns the storage of a tensor; in a step for a GPU, an unknown one is new, such as a constant."""
        if self.allocator is not None and tensor.untyped_storage()._cdata not in self._known:
            self._add(tensor, self.nodes.running())
        return super().find(tensor)

    def _allocated(self, storage: Storage, size: int) -> int:
        return size if self.allocator is None else self.allocator.hold(storage, size)
