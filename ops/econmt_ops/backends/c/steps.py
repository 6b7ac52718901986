"""`EagerSteps` in the C library: one call per step, in float32, and in bfloat16 with float32 sums."""

from __future__ import annotations

from torch import Tensor

from econmt_ops.backends import c as library
from econmt_ops.backends.eager import EagerSteps


class CSteps(EagerSteps):
    """`EagerSteps` for tensors that `econmt_ops.backends.c.serves`."""

    _lstm_forward = staticmethod(library.lstm_forward)
    _lstm_backward = staticmethod(library.lstm_backward)

    def prepare_gates(self, gates: Tensor) -> Tensor:
        """Implements `EagerSteps.prepare_gates`; 16-bit gates remain sums until their step, when they are in cache."""
        return super().prepare_gates(gates) if gates.dtype == self.accumulate else gates
