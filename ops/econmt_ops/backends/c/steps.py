"""`EagerSteps` in the C library: one call per step, in float32, and in bfloat16 with float32 sums."""

from __future__ import annotations

from collections.abc import Sequence

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
        if step.cell is GRU:
            library.gru_forward(step, after[0], output)
        else:
            super()._step_forward(step, after, output)

    def _step_backward(
        self,
        step: CellStep,
        after: Sequence[Tensor],
        dstate: Sequence[Tensor],
        doutput: Tensor | None,
        gradients: StepGradients,
    ) -> None:
        if step.cell is GRU:
            library.gru_backward(step, doutput, dstate[0], gradients)
        else:
            super()._step_backward(step, after, dstate, doutput, gradients)
