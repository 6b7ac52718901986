"""What a step of a recurrent op computes between its matrix products: the seam between the loops and the backends.

The loops of `lstm` and `attentional_lstm` make the products. All pointwise work and all reductions are those of one
`StepKernels`, which they get when a call begins and never ask about devices again: `eager` is PyTorch's operators on
any device, `compiled` the same fused by torch.compile, `c` our library on the CPU, `triton` our kernels on a GPU.

Shapes: B batch, S source positions, H hidden size, A attention size, K steps of a block, T steps. The *compute type*
is that of the products, the *accumulate type* float32, or float64 for float64; see `econmt_ops.core.precision`.
Tensors of a step are rows (B, .) whose last axis is contiguous; their row stride may be any, since most are slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from econmt_ops.cells.protocol import StepCell


class Read(NamedTuple):
    """What the layer above reads of a layer's step: dropout of h, or of h plus what the layer itself has read.

    Attributes:
        destinations: (B, H) tensors that get it, in the compute type.
        residual: (B, H), added to h before dropout; or None.
        keep: (B, H) bool, True where a value is kept and divided by 1 - p; or None: nothing is dropped.
        scale: 1 / (1 - p).
    """

    destinations: Sequence[Tensor]
    residual: Tensor | None = None
    keep: Tensor | None = None
    scale: float = 1.0


class AttentionGradients(NamedTuple):
    """Summed over all steps: that of the keys in the compute or accumulate type, the others in the accumulate type.

    Attributes:
        keys: (B, S, A). score: (A,) or None. norm: (gain (A,), bias (A,)) or None.
    """

    keys: Tensor
    score: Tensor | None
    norm: tuple[Tensor, Tensor] | None


class AttentionKernels(Protocol):
    """The attention of one call, forward and backward, from a query to what the decoder puts out."""

    def forward(self, both: Tensor, outputs: Sequence[Tensor], weights: Tensor) -> None:
        """One step: weights = softmax_s score(query, keys_s), output = tanh(share + sum_s weights_s projected_s).

        Args:
            both: (B, A + H), the query and the share of the stack's output (and the bias) in what tanh reads; if the
                keys have no query product, A is H and the query is the stack's output.
            outputs: (B, H) tensors that get the output.
            weights: (B, S) is written, in the compute type; zero at padded positions.
        """

    def weights_of(self, queries: Tensor) -> Tensor:
        """The weights (K, B, S) of a block's queries (K, B, A), in the compute type, as `forward` made them."""

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
        """One step back; or, with an axis (K, ...) before all of them, the steps of a block, none of which waits.

        Args:
            query: (B, A). context: (B, H), sum_s weights_s projected_s. weights: (B, S). output: (B, H).
            doutputs: (B, H), one or two gradients of the output, which are added.
            dweights: (B, S), another gradient of the weights; or None.
            dboth: (B, A + H) is written, the gradient of ``both``: that of the query, and da = do (1 - o^2).
            dscores: (B, S) in the accumulate type is written: weights (projected . da - sum_s weights projected . da);
                or not, if `gradients` does without it.
        """

    def projected_gradient(self, weights: Tensor, da: Tensor) -> Tensor:
        """The gradient of the projected values (B, S, H): sum_t weights_t da_t.

        Args:
            weights: (T, B, S). da: (T, B, H).
        """

    def gradients(self, queries: Tensor, dscores: Tensor) -> AttentionGradients:
        """What all steps leave to the gradients of keys, score and normalisation, asked for once.

        Args:
            queries: (T, B, A). dscores: (T, B, S), as `backward` wrote them.
        """


class StepKernels(Protocol):
    """The backend of one call."""

    def cell_forward(
        self,
        gates: Tensor,
        before: Tensor,
        after: Tensor,
        h: Sequence[Tensor],
        *,
        keep: bool,
        recurrent: Tensor | None = None,
        read: Read | None = None,
    ) -> None:
        """One step of an LSTM cell.

        Args:
            gates: (B, 4H), the sums before their nonlinearities, in the compute type and the order i, f, g, o. They may
                be overwritten; with ``keep`` they are left as `cell_backward` reads them.
            before: (B, H) the cell state, in the accumulate type. after: (B, H) is written, may be ``before``.
            h: (B, H) tensors, at least one, that get the new h in the compute type.
            keep: whether a backward pass will read these gates.
            recurrent: (B, 4H) in the compute type, a share of the sums that is still to be added to ``gates``; or None.
                `econmt_ops.core.gemm.Product.share` gives one where a library cannot add into ``gates`` itself.
            read: what the layer above reads of this step; or None.
        """

    def step_forward_into(
        self,
        cell: StepCell,
        read: Tensor,
        recurrent: Tensor,
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        output: Tensor,
        extra: Sequence[Tensor],
        padding: Tensor | None,
    ) -> None:
        """One step of any cell, see `StepCell.forward`.

        Args:
            cell, read, recurrent, extra: see there. before: its states.
            after: the same of after the step are written, (B, H) each; may be ``before``.
            output: (B, H) is written: h, zero where ``padding`` is.
            padding: (B,) bool, rows that keep their states; or None.
        """

    def rows_of_sums(self, batch: int) -> int:
        """R, the rows over which a step's gradients of a cell's vectors are spread in `retreat`."""

    def step_backward_into(
        self,
        cell: StepCell,
        read: Tensor,
        recurrent: Tensor,
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        dstate: Sequence[Tensor],
        given: Tensor | None,
        extra: Sequence[Tensor],
        padding: Tensor | None,
        dread: Tensor,
        drecurrent: Tensor,
        dextra: Sequence[Tensor],
    ) -> None:
        """One step of any cell back, see `StepCell.backward`.

        Args:
            cell, read, recurrent, extra: see there. before, after, padding: as `advance` had and gave them.
            dstate: the gradients of ``after``; those of ``before``, but for what flows through the recurrent product,
                take their place.
            given: (B, H), the gradient of the step's output; or None.
            dread, drecurrent: (B, G H) are written.
            dextra: (R, .) each, in the accumulate type; the gradients of ``extra`` are added to them.
        """

    def prepare_gates(self, gates: Tensor) -> Tensor:
        """A block's gates (K, B, 4H), made again as sums, as `cell_backward` reads them; they may be overwritten."""

    def scan_cells(self, gates: Tensor, first: Tensor) -> Tensor:
        """The cell states (K + 1, B, H) of a block, ``first`` (B, H) and that after each step, in the accumulate type.

        Args:
            gates: (K, B, 4H) as `prepare_gates` gives them, or as `cell_forward` left them.
        """

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
        """One step of an LSTM cell back.

        Args:
            gates: (B, 4H) as `cell_forward` left them. before, after: (B, H) the cell states around the step.
            dh: (B, H), one or two gradients of h in the compute type, which are added.
            dc: (B, H) in the accumulate type, the gradient of ``after``; becomes that of ``before``.
            dgates: (B, 4H) is written in the compute type: the gradient of the sums; may be ``gates``.
            keep, scale: as in `Read`, of the first of ``dh``: that is a gradient of what dropout left of h.
        """

    def attention(
        self,
        keys: Tensor,
        projected: Tensor,
        score: Tensor | None,
        norm: tuple[Tensor, Tensor] | None,
        scale: float,
        lengths: Tensor | None,
    ) -> AttentionKernels:
        """The attention of this call.

        Args:
            keys: (B, S, A), zero at padded positions. projected: (B, S, H), the values times their part of the
                combination, zero at padded positions.
            score: (A,) of additive attention, score . tanh(norm(query + keys)); None: dot, scale * query . keys.
            norm: (gain (A,), bias (A,)) of the layer normalisation; or None.
            scale: of dot attention.
            lengths: (B,) int64; or None: all rows are S long.
        """
