"""`EagerSteps` in the C library: one call per step, in float32, and in bfloat16 with float32 sums."""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends import c as library
from econmt_ops.backends.eager import EagerSteps


class CSteps(EagerSteps):
    """`EagerSteps` for tensors that `econmt_ops.backends.c.serves`."""

    def _lstm_forward(
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

    def _lstm_backward(
        self,
        gates: Tensor,
        before: Tensor,
        after: Tensor,
        dh: Tensor,
        other: Tensor | None,
        dc: Tensor,
        dgates: Tensor,
    ) -> None:
        library.lstm_backward(gates, gates.dtype != torch.float32, before, after, other, dh, dc, dgates)

    def prepare_gates(self, gates: Tensor) -> Tensor:
        """Implements `EagerSteps.prepare_gates`; 16-bit gates remain sums until their step, when they are in cache."""
        return super().prepare_gates(gates) if gates.dtype == self.accumulate else gates
