"""`EagerSteps` and `EagerAttention` in Triton: one kernel per step of a cell or of attention, in each direction.

Sizes: B batch, S source positions, H hidden size, A attention size, K steps of a block, R rows of queries.
"""

from __future__ import annotations

from torch import Tensor

from econmt_ops.backends.eager import EagerSteps
from econmt_ops.backends.protocol import AttentionInputs
from econmt_ops.backends.triton import cells, decoder_output, persistent, step_cells
from econmt_ops.backends.triton.attention import TritonAttention
from econmt_ops.backends.triton.covered_attention import TritonCoveredAttention
from econmt_ops.core.weights import Coverage


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

    def rows_of_sums(self, batch: int) -> int:
        """Implements `EagerSteps.rows_of_sums`; every row has its own."""
        return batch

    def prepare_gates(self, gates: Tensor) -> Tensor:
        """Implements `EagerSteps.prepare_gates`."""
        return gates

    def attention(self, inputs: AttentionInputs, coverage: Coverage | None = None) -> TritonAttention:
        """Implements `EagerSteps.attention`."""
        if inputs.lengths is not None:
            inputs = inputs._replace(lengths=inputs.lengths.to(inputs.keys.device))
        return TritonAttention(inputs) if coverage is None else TritonCoveredAttention(inputs, coverage)
