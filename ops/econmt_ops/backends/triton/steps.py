"""The steps by our kernels: one for a step of a cell, one for a step of attention, each way.

Shapes: B batch, S source positions, H hidden size, A attention size, K steps of a block, R rows of queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.backends.eager import CellSteps
from econmt_ops.backends.protocol import AttentionGradients, AttentionKernels, Read
from econmt_ops.backends.triton import cells, step_cells
from econmt_ops.backends.triton.attention import AttentionLauncher, KeyGradients
from econmt_ops.cells.protocol import StepCell


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
        self._kernels = AttentionLauncher(keys, projected, score, norm, scale, lengths)
        self._size = keys.shape[2]

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

    def projected_gradient(self, weights: Tensor, da: Tensor) -> Tensor:
        """See `AttentionKernels`."""
        return torch.bmm(weights.permute(1, 2, 0), da.transpose(0, 1))

    def gradients(self, queries: Tensor, dscores: Tensor) -> AttentionGradients:
        """See `AttentionKernels`; the sums over positions and steps in one launch."""
        if self._kernels.score is None:
            scaled = (dscores * self._kernels.scale).to(queries.dtype).permute(1, 2, 0)
            return AttentionGradients(torch.bmm(scaled, queries.transpose(0, 1)), None, None)
        found = KeyGradients(self._kernels, queries.dtype)
        found.add(_rows(queries), _rows(dscores))
        dscore, *dnorm = found.vectors()
        norm = (dnorm[0], dnorm[1]) if dnorm else None
        return AttentionGradients(found.keys, dscore, norm)


class TritonSteps(CellSteps):
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

    def step_forward_into(
        self,
        cell: StepCell,  # noqa: ARG002 - the number of its states tells
        read: Tensor,
        recurrent: Tensor,
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        output: Tensor,
        extra: Sequence[Tensor],
        padding: Tensor | None,
    ) -> None:
        """See `StepKernels`."""
        step_cells.forward(read, recurrent, before, after, output, extra, padding)

    def rows_of_sums(self, batch: int) -> int:
        """See `StepKernels`; every row has its own."""
        return batch

    def step_backward_into(
        self,
        cell: StepCell,  # noqa: ARG002 - as above
        read: Tensor,
        recurrent: Tensor,
        before: Sequence[Tensor],
        after: Sequence[Tensor],  # noqa: ARG002 - made again
        dstate: Sequence[Tensor],
        given: Tensor | None,
        extra: Sequence[Tensor],
        padding: Tensor | None,
        dread: Tensor,
        drecurrent: Tensor,
        dextra: Sequence[Tensor],
    ) -> None:
        """See `StepKernels`."""
        step_cells.backward(read, recurrent, before, dstate, given, extra, padding, dread, drecurrent, dextra)

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
