"""Until the backends are there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.backends import c as native
from econmt_ops.backends import steps
from econmt_ops.backends.c.attention import CAttention
from econmt_ops.backends.eager_attention import EagerAttention
from econmt_ops.backends.protocol import AttentionKernels, Read
from econmt_ops.core.chunks import scan_cells
from econmt_ops.core.precision import accumulate_dtype


class LocalSteps:
    def __init__(self, like: Tensor, by_c: bool, compiled: bool) -> None:
        self.acc, self.dtype = accumulate_dtype(like.dtype), like.dtype
        self.by_c, self.compiled = by_c, compiled

    def cell_forward(
        self,
        gates: Tensor,
        before: Tensor,
        after: Tensor,
        h: Sequence[Tensor],
        *,
        keep: bool,
        read: Read | None = None,
    ) -> None:
        if self.by_c:
            native.lstm_forward(
                gates, None, before, h[0], after, gates if keep and self.dtype == self.acc else None
            )
        else:
            made, c = steps.cell_forward(gates, before)
            if keep and self.dtype == self.acc:
                steps.activate_(gates)
            after.copy_(c)
            h[0].copy_(made)
        for other in h[1:]:
            other.copy_(h[0])
        if read is not None:
            v = h[0] if read.residual is None else h[0] + read.residual
            if read.keep is not None:
                v = torch.where(read.keep, v * read.scale, 0.0)
            for d in read.destinations:
                d.copy_(v)

    def prepare_gates(self, gates: Tensor) -> Tensor:
        return steps.activate_(gates) if self.dtype == self.acc else gates

    def scan_cells(self, gates: Tensor, first: Tensor) -> Tensor:
        return scan_cells(gates if self.dtype == self.acc else steps.activate(gates, self.acc), first)

    def cell_backward(
        self, gates: Tensor, before: Tensor, after: Tensor, dh: Sequence[Tensor], dc: Tensor, dgates: Tensor
    ) -> None:
        sums = self.dtype != self.acc
        if self.by_c:
            second = dh[1] if len(dh) > 1 else torch.zeros_like(dh[0])
            dc.copy_(native.lstm_backward(gates, sums, before, after, dh[0], second, dc, dgates))
            return
        gates = steps.activate(gates, self.acc) if sums else gates
        total = (dh[0] if len(dh) == 1 else dh[0] + dh[1]).to(self.acc)
        made, before_dc = steps.cell_backward(gates, before, after, total, dc)
        dgates.copy_(made)
        dc.copy_(before_dc)

    def attention(
        self,
        keys: Tensor,
        projected: Tensor,
        score: Tensor | None,
        norm: tuple[Tensor, Tensor] | None,
        scale: float,
        lengths: Tensor | None,
    ) -> AttentionKernels:
        made = CAttention if self.by_c else EagerAttention
        return made(keys, projected, score, norm, scale, lengths)


def step_kernels(backend: str, like: Tensor) -> LocalSteps:
    return LocalSteps(like, native.serves(like), backend == "compiled")
