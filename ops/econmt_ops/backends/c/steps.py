"""`EagerSteps` in the C library: one call per step, in float32, and in bfloat16 with float32 sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from econmt_ops.backends import c as library
from econmt_ops.backends.eager import EagerSteps
from econmt_ops.backends.protocol import CellStep, StepGradients
from econmt_ops.cells.gru import GRU


class CSteps(EagerSteps):
    """`EagerSteps` for tensors that `econmt_ops.backends.c.serves`."""

    _lstm_forward = staticmethod(library.lstm_forward)
    _lstm_backward = staticmethod(library.lstm_backward)

    def prepare_gates(self, gates: Tensor) -> Tensor:
        """Implements `EagerSteps.prepare_gates`; 16-bit gates remain sums until their step, when they are in cache."""
        return super().prepare_gates(gates) if gates.dtype == self.accumulate else gates

    def _step_forward(self, step: CellStep, after: Sequence[Tensor], output: Tensor) -> None:
        if step.cell is not GRU:
            super()._step_forward(step, after, output)
            return
        fields = self._fields(step)
        library.call("gru_cell_forward", step.read.numel(), **fields, after=after[0], output=output)

    def _step_backward(
        self,
        step: CellStep,
        after: Sequence[Tensor],
        dstate: Sequence[Tensor],
        doutput: Tensor | None,
        gradients: StepGradients,
    ) -> None:
        if step.cell is not GRU:
            super()._step_backward(step, after, dstate, doutput, gradients)
            return
        library.call(
            "gru_cell_backward",
            step.read.numel(),
            **self._fields(step),
            incoming=doutput,
            dh=dstate[0],
            dread=gradients.read,
            drecurrent=gradients.recurrent,
        )

    def _fields(self, step: CellStep) -> dict[str, Any]:
        """Returns the fields that both passes of a step of a GRU share."""
        _, read, recurrent, (before,), _, padding = step
        sizes = library.sizes("rows hidden", before)
        return {**sizes, "read": read, "recurrent": recurrent, "padding": padding, "before": before}
