"""Interfaces between the loops of recurrent ops, which compute the matrix products, and the backends.

All pointwise work and all reductions of a step belong to one `econmt_ops.backends.eager.EagerSteps`, chosen when a call
begins: `eager` uses PyTorch operators on any device; in subclasses `compiled` fuses them by torch.compile, `c` is the C
library for the CPU, `triton` the Triton kernels for a GPU.

Sizes: B batch, S source positions, H hidden size, A attention size, K steps of a block, T steps. The *compute type* is
the type of the products, the *accumulate type* float32, or float64 for float64; see `econmt_ops.core.precision`.
Tensors of a step are rows (B, .) with a contiguous last axis; their row stride may be any, because most are slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from econmt_ops.cells.protocol import StepCell


class Read(NamedTuple):
    """Input of the next layer at one step: dropout of h, or of h plus the input of the layer itself.

    Attributes:
        destinations: (B, H) tensors that receive it, in the compute type.
        residual: (B, H), added to h before dropout; or None.
        keep: (B, H) bool, True where a value is kept and divided by 1 - p; None: no dropout.
        scale: 1 / (1 - p).
    """

    destinations: Sequence[Tensor]
    residual: Tensor | None = None
    keep: Tensor | None = None
    scale: float = 1.0


class AttentionInputs(NamedTuple):
    """Inputs of the attention that all steps of a call share.

    Attributes:
        keys: (B, S, A), zero at padded positions.
        projected: (B, S, P), the values times their part of the combination weight, zero at padded positions.
        score: (A,) for additive attention, score . tanh(norm(query + keys)); None: dot, scale * query . keys.
        norm: (gain (A,), bias (A,)) of the layer normalisation; or None.
        scale: Scale of dot attention.
        lengths: (B,) int64 or int32; or None: all rows are S long.
        squashes: True if the output is tanh(share + context); otherwise it is the context.
    """

    keys: Tensor
    projected: Tensor
    score: Tensor | None
    norm: tuple[Tensor, Tensor] | None = None
    scale: float = 1.0
    lengths: Tensor | None = None
    squashes: bool = True


class OutputStep(NamedTuple):
    """Output of a step that is not tanh(share + context) alone; see `econmt_ops.cells.output`.

    Attributes:
        share, context: (B, P). output: (B, H), the output that they gave.
        bias: (H,) of a gate, norm: gain and bias (H,) of a layer normalisation, in the accumulate type; or None.
    """

    share: Tensor
    context: Tensor
    output: Tensor
    bias: Tensor | None
    norm: tuple[Tensor, Tensor] | None


class CoverageStep(NamedTuple):
    """Tensors of a step of coverage.

    Attributes:
        before, after: (B, S, W) around the step, not the same tensor; forward ``after`` is written.
        state: (B, P), the product of the stack's output; None for "sum".
    """

    before: Tensor
    after: Tensor
    state: Tensor | None


class AttentionGradients(NamedTuple):
    """Gradients summed over all steps, in the accumulate type; that of the keys may be in the compute type.

    Attributes:
        keys: (B, S, A). score: (A,) or None. norm: (gain (A,), bias (A,)) or None.
    """

    keys: Tensor
    score: Tensor | None
    norm: tuple[Tensor, Tensor] | None


class AttentionBackward(NamedTuple):
    """Tensors of the backward pass of one step of attention; with a leading axis K on all of them, of a block.

    Attributes:
        query: (B, A). context: (B, P), sum_s weights_s projected_s. weights: (B, S). output: (B, H).
        doutputs: (B, H), one or two gradients of the output, which are added.
        dweights: (B, S), another gradient of the weights; or None.
        dboth: (B, A + H) is written, the gradient of ``both``: that of the query, and da = do (1 - o^2); without
            `AttentionInputs.squashes` that of the query alone.
        dscores: (B, S) in the accumulate type is written: weights (projected . da - sum_s weights projected . da); may
            be left unwritten if `EagerAttention.gradients` does not need it.
        coverage: Coverage of the step; None without coverage, where the rest is not read.
        dcoverage: (B, S, W), the gradient of the coverage after the step; overwritten by that before it.
        dstate: (B, P) is written, the gradient of `CoverageStep.state`; None for "sum".
    """

    query: Tensor
    context: Tensor
    weights: Tensor
    output: Tensor
    doutputs: Sequence[Tensor]
    dweights: Tensor | None
    dboth: Tensor
    dscores: Tensor
    coverage: CoverageStep | None = None
    dcoverage: Tensor | None = None
    dstate: Tensor | None = None


class CellStep(NamedTuple):
    """Arguments of one step of any cell.

    Attributes:
        cell: Cell, whose `StepCell.forward` describes ``read``, ``recurrent`` and ``extra``.
        before: Its states before the step, (B, H) each.
        padding: (B,) bool, True for rows that keep their states; or None.
    """

    cell: StepCell
    read: Tensor
    recurrent: Tensor
    before: Sequence[Tensor]
    extra: Sequence[Tensor]
    padding: Tensor | None


class StepGradients(NamedTuple):
    """Tensors that receive the gradients of a step of a cell.

    Attributes:
        read, recurrent: (B, G H), the gradients of the products; written.
        extra: (R, .) each, in the accumulate type; the gradients of the cell's vectors are added to them.
    """

    read: Tensor
    recurrent: Tensor
    extra: Sequence[Tensor]
