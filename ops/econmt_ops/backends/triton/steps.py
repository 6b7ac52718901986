"""The steps by our kernels: one for a step of a cell, one for a step of attention, each way.

Shapes: B batch, S source positions, H hidden size, A attention size, K steps of a block, R rows of queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.backends.protocol import AttentionGradients, AttentionKernels, Read
from econmt_ops.backends.triton import cells
from econmt_ops.backends.triton.attention import Attention, KeyGradients


def _rows(block: Tensor) -> Tensor:
    """(K, B, .) or (B, .) as (R, .)."""
    return block.reshape(-1, block.shape[-1])


class TritonAttention:
    """`econmt_ops.backends.protocol.AttentionKernels` by `econmt_ops.backends.triton.attention`.

    Args:
        keys, projected, score, norm, scale, lengths: as `StepKernels.attention` takes them.
    """

    def __init__(
        self,
        keys: Tensor,
        projected: Tensor,
        score: Tensor | None,
        norm: tuple[Tensor, Tensor] | None,
        scale: float,
        lengths: Tensor | None,
    ) -> None:
        self._kernels = Attention(keys, projected, score, norm, scale, lengths)
        self._size = keys.shape[2]
        self._of_keys: KeyGradients | None = None
        self._dkeys: Tensor | None = None
        self._dprojected: Tensor | None = None

    def forward(self, both: Tensor, outputs: Sequence[Tensor], weights: Tensor) -> None:
        """See `AttentionKernels`."""
        self._kernels.forward(both[:, : self._size], both[:, self._size :], weights, outputs[:2])
        for other in outputs[2:]:
            other.copy_(outputs[0])

    def weights_of(self, queries: Tensor) -> Tensor:
        """See `AttentionKernels`; all steps in one launch."""
        weights = queries.new_empty(*queries.shape[:2], self._kernels.positions)
        self._kernels.forward(_rows(queries), None, _rows(weights))
        return weights

    def backward(
        self,
        query: Tensor,
        context: Tensor,
        weights: Tensor,
        output: Tensor,
        doutputs: Sequence[Tensor],
        dweights: Tensor | None,
        dboth: Tensor,
        dscores: Tensor,
    ) -> None:
        """See `AttentionKernels`; a block in one launch."""
        dboth = _rows(dboth)
        self._kernels.backward(
            _rows(query),
            _rows(weights),
            _rows(context),
            _rows(output),
            [_rows(part) for part in doutputs],
            None if dweights is None else _rows(dweights),
            dboth[:, : self._size],
            dboth[:, self._size :],
            _rows(dscores),
        )

    def sum_block(self, queries: Tensor, weights: Tensor, dboth: Tensor, dscores: Tensor) -> None:
        """See `AttentionKernels`."""
        da = dboth[..., self._size :].transpose(0, 1)
        self._dprojected = _add_products(self._dprojected, weights.permute(1, 2, 0), da)
        if self._kernels.score is None:
            scaled = (dscores * self._kernels.scale).to(queries.dtype).permute(1, 2, 0)
            self._dkeys = _add_products(self._dkeys, scaled, queries.transpose(0, 1))
            return
        if self._of_keys is None:
            self._of_keys = KeyGradients(self._kernels)
        self._of_keys.add(_rows(queries), _rows(dscores))

    def gradients(self) -> AttentionGradients:
        """See `AttentionKernels`."""
        assert self._dprojected is not None
        if self._of_keys is None:
            assert self._dkeys is not None
            return AttentionGradients(self._dkeys, self._dprojected, None, None)
        dscore, *dnorm = self._of_keys.vectors()
        norm = (dnorm[0], dnorm[1]) if dnorm else None
        return AttentionGradients(self._of_keys.keys, self._dprojected, dscore, norm)


def _add_products(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """The products of left (B, N, K) and right (B, K, M) in float32, added to ``total`` in place or, if None, new."""
    if left.is_cuda and left.dtype != torch.float32:
        if total is None:
            return torch.bmm(left, right, out_dtype=torch.float32)
        torch.baddbmm(total, left, right, out_dtype=torch.float32, out=total)
        return total
    left, right = left.to(torch.float32), right.to(torch.float32)
    return torch.bmm(left, right) if total is None else total.baddbmm_(left, right)


class TritonSteps:
    """`econmt_ops.backends.protocol.StepKernels` by our kernels; gates are left as sums, in any type.

    Args:
        like: a tensor of the call's compute type, which is not float64.
    """

    def __init__(self, like: Tensor) -> None:
        assert like.dtype != torch.float64

    def cell_forward(
        self,
        gates: Tensor,
        before: Tensor,
        after: Tensor,
        h: Sequence[Tensor],
        *,
        keep: bool,  # noqa: ARG002 - kept either way
        recurrent: Tensor | None = None,
        read: Read | None = None,
    ) -> None:
        """See `StepKernels`."""
        if recurrent is not None:
            gates.add_(recurrent)
        cells.forward(gates, before, after, h, read)

    def prepare_gates(self, gates: Tensor) -> Tensor:
        """See `StepKernels`."""
        return gates

    def scan_cells(self, gates: Tensor, first: Tensor) -> Tensor:
        """See `StepKernels`."""
        return cells.scan(gates, first)

    def cell_backward(
        self,
        gates: Tensor,
        before: Tensor,
        after: Tensor,
        dh: Sequence[Tensor],
        dc: Tensor,
        dgates: Tensor,
        *,
        keep: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        """See `StepKernels`."""
        cells.backward(gates, before, after, dh, dc, dgates, keep, scale)

    def attention(
        self,
        keys: Tensor,
        projected: Tensor,
        score: Tensor | None,
        norm: tuple[Tensor, Tensor] | None,
        scale: float,
        lengths: Tensor | None,
    ) -> AttentionKernels:
        """See `StepKernels`."""
        here = None if lengths is None else lengths.to(keys.device)
        return TritonAttention(keys, projected, score, norm, scale, here)
