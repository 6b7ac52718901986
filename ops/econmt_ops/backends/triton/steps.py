"""`EagerSteps` and `AttentionKernels` in Triton: one kernel per step of a cell or of attention, in each direction.

Sizes: B batch, S source positions, H hidden size, A attention size, K steps of a block, R rows of queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.backends.eager import EagerSteps
from econmt_ops.backends.protocol import (
    AttentionBackward,
    AttentionGradients,
    AttentionInputs,
    AttentionKernels,
    CoverageInputs,
    CoverageStep,
)
from econmt_ops.backends.triton import cells, decoder_output, persistent, step_cells
from econmt_ops.backends.triton.attention import AttentionLauncher, KeyGradients
from econmt_ops.backends.triton.covered_attention import TritonCoveredAttention


def _rows(block: Tensor) -> Tensor:
    """Reshapes (K, B, .) or (B, .) to (R, .)."""
    return block.reshape(-1, block.shape[-1])


class TritonAttention(AttentionKernels):
    """`AttentionKernels` by `econmt_ops.backends.triton.attention`.

    Args:
        inputs: keys, values and weights; lengths on their device.

    Attributes:
        launcher: the kernels.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        keys, projected, score, norm, scale, lengths, self._squashes = inputs
        self.launcher = AttentionLauncher(keys, projected, score, norm, scale, lengths)
        self._size = keys.shape[2]

    def forward(
        self, both: Tensor, outputs: Sequence[Tensor], weights: Tensor, coverage: CoverageStep | None = None
    ) -> None:
        """Implements `AttentionKernels.forward`."""
        assert coverage is None
        share = both[:, self._size :] if self._squashes else None
        self.launcher.forward(both[:, : self._size], share, weights, outputs[:2])
        for other in outputs[2:]:
            other.copy_(outputs[0])

    def weights_of(self, queries: Tensor, coverage: Sequence[Tensor] | None = None) -> Tensor:
        """Implements `AttentionKernels.weights_of`; all steps in one launch."""
        assert coverage is None
        weights = queries.new_empty(*queries.shape[:2], self.launcher.positions)
        self.launcher.forward(_rows(queries), None, _rows(weights))
        return weights

    def backward(self, step: AttentionBackward) -> None:
        """Implements `AttentionKernels.backward`; a block in one launch."""
        assert step.coverage is None
        dboth = _rows(step.dboth)
        self.launcher.backward(
            _rows(step.query),
            _rows(step.weights),
            _rows(step.context),
            _rows(step.output) if self._squashes else None,
            [_rows(part) for part in step.doutputs],
            None if step.dweights is None else _rows(step.dweights),
            dboth[:, : self._size],
            dboth[:, self._size :] if self._squashes else None,
            _rows(step.dscores),
        )

    def gradients(self, queries: Tensor, dscores: Tensor) -> AttentionGradients:
        """Implements `AttentionKernels.gradients`; the sums over positions and steps in one launch."""
        if self.launcher.score is None:
            scaled = (dscores * self.launcher.scale).to(queries.dtype).permute(1, 2, 0)
            return AttentionGradients(torch.bmm(scaled, queries.transpose(0, 1)), None, None)
        sums = KeyGradients(self.launcher, queries.dtype)
        sums.add(_rows(queries), _rows(dscores))
        dscore, *dnorm = sums.vectors()
        norm = (dnorm[0], dnorm[1]) if dnorm else None
        return AttentionGradients(sums.keys, dscore, norm)


class TritonSteps(EagerSteps):
    """`EagerSteps` in Triton; gates remain sums, in any type.

    Args:
        like: a tensor of the call's compute type, which is not float64.
    """

    cell_forward = staticmethod(cells.forward)
    cell_backward = staticmethod(cells.backward)
    scan_cells = staticmethod(persistent.scan_cells)
    step_forward_into = staticmethod(step_cells.forward)
    step_backward_into = staticmethod(step_cells.backward)
    output_forward = staticmethod(decoder_output.forward)
    output_backward = staticmethod(decoder_output.backward)

    def __init__(self, like: Tensor) -> None:
        super().__init__(like)
        assert like.dtype != torch.float64

    def rows_of_sums(self, batch: int) -> int:
        """Implements `EagerSteps.rows_of_sums`; every row has its own."""
        return batch

    def prepare_gates(self, gates: Tensor) -> Tensor:
        """Implements `EagerSteps.prepare_gates`."""
        return gates

    def attention(self, inputs: AttentionInputs, coverage: CoverageInputs | None = None) -> AttentionKernels:
        """Implements `EagerSteps.attention`."""
        if inputs.lengths is not None:
            inputs = inputs._replace(lengths=inputs.lengths.to(inputs.keys.device))
        return TritonAttention(inputs) if coverage is None else TritonCoveredAttention(inputs, coverage)
