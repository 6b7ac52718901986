"""Tracker that tells by itself which phase a program's step is in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from econmt_memory.measure.clock import Clock
from econmt_memory.measure.scopes import current_layer
from econmt_memory.measure.tracker import Tracker
from econmt_memory.measure.user_lines import UserLine


class StepTracker(Tracker):  # type: ignore[no-untyped-call]
    """Tracker of a program's step, which tells by itself which phase the step is in."""

    clock: Clock | None = None
    calling: UserLine | None = None
    containers: frozenset[str] = frozenset()
    _updating = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled functions run compiled."""
        return True

    def update(self, *, elementwise: bool = False) -> None:  # noqa: ARG002
        """Notes that an optimizer's step begins or ends; its operators are recorded in any case."""
        self._updating = not self._updating

    def use(self, tensor: Tensor) -> None:
        """Does nothing: the tracker sees what operators use."""

    def made(self, tensor: Any) -> None:
        """Does nothing: the tracker finds the lines that make tensors by itself."""

    def return_to(self, layer: str) -> None:
        """Does nothing: the tracker sees each operator of the backward pass."""

    def phase(self) -> str:
        """Returns the current phase, and begins it if it is another one than before."""
        if self._updating:
            phase = "optimizer"
        elif torch._C._current_graph_task_id() >= 0:
            phase = "backward"
        elif current_layer() != "other" or not self.begins:
            phase = "forward"
        else:  # code between the phases, such as clipping of gradients, belongs to the one before
            phase = self.begins[-1].phase
        if not self.begins or self.begins[-1].phase != phase:
            self.begin(phase)
        if self.clock is not None:
            self.clock.begin((phase, self.nodes.running()))
        return phase
