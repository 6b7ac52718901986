"""`EagerSteps` in the C library: one call per step, in float32, and in bfloat16 with float32 sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.backends import c as library
from econmt_ops.backends.c.attention import CAttention
from econmt_ops.backends.eager import EagerSteps
from econmt_ops.backends.protocol import CellStep, StepGradients
from econmt_ops.cells.gru import GRU


class CSteps(EagerSteps):
    """`EagerSteps` for tensors that `econmt_ops.backends.c.serves`."""

    _attention = CAttention

    def __init__(self, like: Tensor) -> None:
        """Takes a tensor of the call's compute type."""
        super().__init__(like)
        self._zero = like.new_zeros(1, 1)

    def _cell_forward(
        self,
        gates: Tensor,
        recurrent: Tensor | None,
        before: Tensor,
        after: Tensor,
        h: Tensor,
        keep: bool,
    ) -> None:
        kept = gates if keep and gates.dtype == torch.float32 else None
        library.lstm_forward(gates, recurrent, before, h, after, kept)

    def prepare_gates(self, gates: Tensor) -> Tensor:
        """Implements `EagerSteps.prepare_gates`; 16-bit gates remain sums until their step, when they are in cache."""
        return super().prepare_gates(gates) if gates.dtype == self.accumulate else gates

    def _cell_backward(
        self,
        gates: Tensor,
        before: Tensor,
        after: Tensor,
        dh: Sequence[Tensor],
        dc: Tensor,
        dgates: Tensor,
    ) -> None:
        first, second = dh if len(dh) == 2 else (dh[0], self._zeros_like(dc))
        sums = gates.dtype != torch.float32
        library.lstm_backward(gates, sums, before, after, first, second, dc, dgates)

    def _zeros_like(self, like: Tensor) -> Tensor:
        """Returns zeros (B, H), expanded from one row."""
        if self._zero.shape[1] != like.shape[1]:
            self._zero = self._zero.new_zeros(1, like.shape[1])
        return self._zero.expand(like.shape)

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
