"""Tensors and products that both passes of the recomputing attentional LSTM use.

Sizes: B batch, T steps, S source positions, H hidden, A attention size, E width of the values, L layers, G parts of a
layer's products, P width of the shares of o, W width of the coverage, K steps of a block. Internally time is the first
axis, (T, B, .), so that the rows of a step are contiguous.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.additive_attention.reference import pair_of
from econmt_ops.backends import steps_for
from econmt_ops.backends.attention import EagerAttention
from econmt_ops.backends.protocol import AttentionInputs, Read
from econmt_ops.cells.lstm import LSTM
from econmt_ops.cells.protocol import Split
from econmt_ops.cells.table import KINDS
from econmt_ops.core.alignment import even
from econmt_ops.core.chunks import reaches, split_blocks
from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.weights import Coverage, Matrix
from econmt_ops.dispatch.rule import device_of
from econmt_ops.products.dropout import apply_dropout, join_seed
from econmt_ops.products.gemm import Product
from econmt_ops.products.low_rank import (
    LowRankProduct,
    cast_together,
    columns,
    joined,
    matrices_of_tensors,
    product_of,
    project,
)
from econmt_ops.products.packed import is_available
from econmt_ops.products.stack import StackOptions

_ROWS_OF_STATE = 8
"""Multiple of the rows of a product whose rows the tensor cores of a GPU read fast."""


class AttentionalArguments(NamedTuple):
    """Arguments of the attentional LSTM operator.

    Matrices and biases may have another type than the inputs, whose type is used for the computation; each gradient has
    the type of its argument.

    Attributes:
        inputs: (B, T, I); or, with ``places``, the distinct rows (N, I).
        keys: (B, S, A), for additive attention as returned by `cleaned`. values: (B, S, E).
        input_weights, hidden_weights: per layer (G H, .) and (G H, H), or the two factors of each. biases,
            recurrent_biases: per layer (G H,), or empty. extra: further weights of each layer, see
            `econmt_ops.cells.protocol.Split`.
        query, score: see `AttentionalLSTMWeights`.
        combine: (P, H + E), P is H or, with a context gate, 2H, the gate first. combine_bias: (P,), or None.
            context_bias: (H,), see `ContextGate`.
        norm: gain and bias (A,) of the layer normalisation of the scores, or empty. output_norm: (H,), those of the
            output.
        coverage_key, coverage_shares, coverage_attention, coverage_state, coverage_recurrent: see `Coverage`.
        lengths: (B,) int64, lengths of the keys. clean: True if keys and values are finite past them.
        places: (B, T) int64, row index into ``inputs`` of each position.
        first_h: per layer (B, H), before the first step. first_c: likewise the other states of all layers.
            first_output: (B, H), o before it. first_coverage: (B, S, W), in the accumulate type.
        cell: name of the cell. coverage: kind of the coverage, or "".
        seed, device_seed, first_row: as returned by `split_seed`.
        overwrites: True if the backward pass may overwrite the gradient of the outputs.
        tf32: True if float32 factors of products may be rounded to TF32.
    """

    inputs: Tensor
    keys: Tensor
    values: Tensor
    input_weights: list[Tensor]
    hidden_weights: list[Tensor]
    biases: list[Tensor]
    recurrent_biases: list[Tensor]
    extra: list[Tensor]
    query: Tensor | None
    score: Tensor | None
    combine: Tensor
    combine_bias: Tensor | None
    context_bias: Tensor | None
    norm: list[Tensor]
    output_norm: list[Tensor]
    coverage_key: Tensor | None
    coverage_shares: Tensor | None
    coverage_attention: Tensor | None
    coverage_state: Tensor | None
    coverage_recurrent: Tensor | None
    lengths: Tensor | None
    places: Tensor | None
    first_h: list[Tensor]
    first_c: list[Tensor]
    first_output: Tensor
    first_coverage: Tensor | None
    cell: str
    coverage: str
    residual: bool
    dropout: float
    seed: int
    device_seed: Tensor | None
    first_row: int
    variational: bool
    scale: float
    clean: bool
    stash: str
    backend: str
    overwrites: bool
    tf32: bool

    def blocks(self) -> list[tuple[int, int]]:
        """Returns the blocks of steps as (begin, end)."""
        batch, steps = (self.inputs if self.places is None else self.places).shape[:2]
        hidden, dtype = self.first_output.shape[1], self.inputs.dtype
        if self.backend == "triton":  # its kernels read the gates in the compute type
            if self.tf32 and dtype == torch.float32:  # as fast products need as many rows as those of 16 bits
                dtype = torch.float16
            return split_blocks(steps, batch, hidden, dtype, large=True, stash=self.stash)
        return split_blocks(steps, batch, hidden, accumulate_dtype(dtype), stash=self.stash)


class Result(NamedTuple):
    """Results of the forward pass; stashed tensors that the stash level omits have no elements.

    Attributes:
        outputs: (T, B, H), o. attention: (T, B, S).
        h: (L, T, B, H), stash. c: (N, T, B, H), stash, or (N, number of blocks, B, H): the N states of all layers
            beside h, or those before each block.
        gates: (L, T, B, 4H), stash, as the backend keeps them; of LSTM layers alone.
        coverage: (T, B, S, W), stash, after each step.
        last_h: (L, B, H), last_c: (N, B, H), last_coverage: (B, S, W), after the last step.
    """

    outputs: Tensor
    attention: Tensor
    h: Tensor
    c: Tensor
    gates: Tensor
    coverage: Tensor
    last_h: Tensor
    last_c: Tensor
    last_coverage: Tensor


def empty_result(call: AttentionalArguments, keep: bool) -> Result:
    """Allocates the tensors of the result; ``keep``: a backward pass will follow."""
    inputs, layers, others = call.inputs, len(call.first_h), len(call.first_c)
    batch, steps = (inputs if call.places is None else call.places).shape[:2]
    hidden = call.first_output.shape[1]
    accumulate = accumulate_dtype(inputs.dtype)
    is_lstm = call.cell == LSTM.name
    cells = (steps if is_lstm and reaches(call.stash, "cells") else len(call.blocks())) if keep else 0
    gates = steps if keep and is_lstm and reaches(call.stash, "gates") else 0
    positions = call.keys.shape[1]
    # On a GPU rows begin where products read them fast.
    width = even(positions, inputs.dtype) if device_of(inputs) == "cuda" else positions
    covered = (0, 0, 0) if call.first_coverage is None else call.first_coverage.shape
    return Result(
        inputs.new_empty(steps, batch, hidden),
        inputs.new_empty(steps, batch, width)[..., :positions],
        inputs.new_empty(layers, steps if keep else 0, batch, hidden),
        inputs.new_empty(others, cells, batch, hidden, dtype=accumulate),
        inputs.new_empty(layers, gates, batch, 4 * hidden),
        inputs.new_empty(steps if keep else 0, *covered, dtype=accumulate),
        inputs.new_empty(layers, batch, hidden),
        inputs.new_empty(others, batch, hidden, dtype=accumulate),
        inputs.new_empty(covered, dtype=accumulate),
    )


class AttentionalProblem:
    """Tensors of one call, and values that both passes derive from them.

    Attributes:
        call: arguments of the operator. run: the backend. cell: the layers' cell.
        inputs: (T, B, I); or, with ``places``, the distinct rows (N, I).
        places: (T, B), row index of each position, or None.
        padding: (B, S), True at padded positions; None where keys and values are finite everywhere.
        layers, query, combine, combine_bias: weights in the compute type. context_bias, norm, and ``extra`` of the
            layers: those of a gate, of the output's layer normalisation (gain and bias) and of the cell, rounded to it,
            in the accumulate type; or None.
        from_input, from_output: columns (G H, I) and (G H, H) of the bottom input weight that multiply inputs and o.
        from_top, from_values: columns (P, H) and (P, E) of the combination weight that multiply the stack's output and
            the context.
        from_state: (P', H), the coverage's weight of the stack's output, with rows of zeros behind it; or None.
        size, width_of_share: A and P. squashes: True if o is tanh(share + context).
        masks: dropout masks of the inputs of the layers, (B, T, H) or (B, 1, H) bool, True where kept; or None.
        scale: factor of what dropout keeps.
    """

    def __init__(self, call: AttentionalArguments) -> None:
        self.call = call
        inputs, places = call.inputs, call.places
        self.run = steps_for(inputs, call.backend)
        self.inputs = inputs.transpose(0, 1) if places is None else inputs
        self.places = None if places is None else places.t()
        by_time = self.inputs if self.places is None else self.places
        self.steps, self.batch, self.width = *by_time.shape[:2], inputs.shape[-1]
        self.dtype, self.accumulate = inputs.dtype, accumulate_dtype(inputs.dtype)
        self.cell: Any = KINDS[call.cell]
        self.is_lstm = self.cell is LSTM
        self.layers: list[Split] = []
        self._together: list[Tensor | None] = []
        count = len(call.first_h)
        each = len(call.extra) // count
        inputs_of, hiddens = (
            matrices_of_tensors(part, count) for part in (call.input_weights, call.hidden_weights)
        )
        for number in range(count):
            read, recurrent, both = cast_together(inputs_of[number], hiddens[number], self.dtype)
            bias, recurrent_bias = (
                parts[number].to(self.dtype) if parts else None
                for parts in (call.biases, call.recurrent_biases)
            )
            extra = call.extra[number * each : (number + 1) * each]
            layer = Split(read, recurrent, bias, recurrent_bias, tuple(map(self.rounded, extra)))
            self.layers.append(layer)
            self._together.append(both)
        self.hidden, self.size = call.first_output.shape[1], call.keys.shape[2]
        self.width_of_share = len(call.combine)
        self.query = None if call.query is None else call.query.to(self.dtype)
        self.combine = call.combine.to(self.dtype)
        self.combine_bias = None if call.combine_bias is None else call.combine_bias.to(self.dtype)
        self.context_bias = None if call.context_bias is None else self.rounded(call.context_bias)
        self.norm = pair_of(list(map(self.rounded, call.output_norm)))
        self.squashes = self.norm is None and self.context_bias is None
        self.from_state = None
        if call.coverage_state is not None:
            rows = -len(call.coverage_state) % _ROWS_OF_STATE
            self.from_state = functional.pad(call.coverage_state.to(self.dtype), (0, 0, 0, rows))
        self.from_top, self.from_values = self.combine[:, : self.hidden], self.combine[:, self.hidden :]
        bottom = self.layers[0].input
        self.from_input = columns(bottom, 0, self.width)
        self.from_output = columns(bottom, self.width, bottom.shape[1])
        keys = call.keys
        self.padding = None if call.clean else padding_mask(call.lengths, keys.shape[1], keys.device)
        seed = join_seed(call.seed, call.device_seed, call.first_row)
        options = StackOptions(dropout=call.dropout, seed=seed, variational=call.variational)
        shape = self.batch, self.steps, self.hidden
        self.masks = options.keep_masks(len(self.layers), shape, inputs.device)
        self.scale = 1.0 / (1.0 - call.dropout)
        self.blocks = call.blocks()

    def rounded(self, weight: Tensor) -> Tensor:
        """Returns a weight in the accumulate type, rounded to the compute type, as all weights are."""
        return weight.to(self.dtype).to(self.accumulate)

    def keeps(self, level: str) -> bool:
        """Returns True if the stash includes this level."""
        return reaches(self.call.stash, level)

    def product(self, weight: Matrix, bias: Tensor | None = None) -> Product | LowRankProduct:
        """Prepares the product with a weight, which every step computes once."""
        layout = "packed" if is_available(self.inputs) else "row"
        return product_of(weight, bias, layout, calls=self.steps)

    def joint(self, layer: int) -> Matrix:
        """Returns the weight (4H, 2H) that maps a layer's row [layer input ; h of the previous step] to its gates.

        The bottom layer's row holds o of the previous step; the share of its inputs is computed for many steps at once.
        """
        weights, both = self.layers[layer], self._together[layer]
        if both is not None:
            return both[:, both.shape[1] - 2 * self.hidden :]
        return joined(self.from_output if layer == 0 else weights.input, weights.hidden)

    def both(self) -> Tensor:
        """Returns the weight (A + P + P', H) from the stack's output to the query, its share of o, and of the coverage.

        Without query weights it has no rows for the query.
        """
        parts = [part for part in (self.query, self.from_top, self.from_state) if part is not None]
        return self.from_top if len(parts) == 1 else torch.cat(parts)

    def both_bias(self) -> Tensor | None:
        """Returns the bias of the product with `both`, zero but for the share of o; or None."""
        bias = self.combine_bias
        if bias is None:
            return None
        before = 0 if self.query is None else self.size
        after = 0 if self.from_state is None else len(self.from_state)
        return functional.pad(bias, (before, after)) if before or after else bias

    def parts_of_both(self, both: Tensor, begin: int) -> tuple[Tensor, Tensor | None]:
        """Returns the shares of o (..., P) and of the coverage (..., P') in a product, the former from ``begin`` on."""
        end, state = begin + self.width_of_share, self.call.coverage_state
        return both[..., begin:end], None if state is None else both[..., end : end + len(state)]

    def projected(self) -> Tensor:
        """Returns V' = V Wcv^T (B, S, P), values times their part of the combination weight; finite in padding, too.

        The context's share of the output is then sum_s alpha_s V'_s: one product per call instead of one per step.
        """
        # Flattened to rows: values whose batch is not their first axis in memory would otherwise use a batched product,
        # which copies the matrix once per sentence.
        values = self.call.values
        rows = project(values.reshape(-1, values.shape[2]), self.from_values)
        projected = rows.view(*values.shape[:2], self.width_of_share)
        if self.padding is not None:
            projected.masked_fill_(self.padding.unsqueeze(2), 0.0)
        return projected

    def attention(self, projected: Tensor) -> EagerAttention:
        """Returns the attention kernels of this call."""
        call = self.call
        # Additive attention receives clean keys; the keys of dot attention may be the values.
        keys = zero_padding(call.keys, self.padding) if call.score is None else call.keys
        score = None if call.score is None else call.score.to(self.dtype)
        inputs = AttentionInputs(
            keys, projected, score, pair_of(call.norm), call.scale, call.lengths, self.squashes
        )
        return self.run.attention(inputs, self.coverage())

    def coverage(self) -> Coverage | None:
        """Returns the weights of the coverage but ``state``, rounded to the compute type; None if there is none."""
        call = self.call
        if call.coverage_key is None or call.coverage_shares is None:
            return None
        key, attention, recurrent = (
            None if part is None else self.rounded(part)
            for part in (call.coverage_key, call.coverage_attention, call.coverage_recurrent)
        )
        assert key is not None
        shares = call.coverage_shares.to(self.accumulate)
        return Coverage(call.coverage, key, shares, attention, recurrent=recurrent)

    def read_of(self, layer: int, position: int, read: Tensor, destination: Tensor) -> Read | None:
        """Returns what the layer above reads at a step of a layer with input ``read`` (B, H); None if it reads h."""
        above = layer + 1
        mask = None if above == len(self.layers) else self.mask(above, position, position + 1)
        residual = read if self.call.residual and layer > 0 else None
        if mask is None and residual is None:
            return None
        return Read((destination,), residual, None if mask is None else mask[0], self.scale)

    def below(self, layer: int, position: int, dread: Tensor, above: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the gradient of the output of the layer below at a step, and the mask that dropout applies to it.

        ``dread`` and ``above`` (B, H) are the gradients of a layer's input and of its output, after its step backward.
        """
        if layer > 0 and self.call.residual:
            return self.drop(layer, (dread + above).unsqueeze(0), position, position + 1).squeeze(0), None
        mask = self.mask(layer, position, position + 1) if layer > 0 else None
        return dread, None if mask is None else mask[0]

    def read(self, begin: int, end: int) -> Tensor:
        """Returns contiguous inputs (K, B, I) of a block of steps, or their row indices (K, B)."""
        return (self.inputs if self.places is None else self.places)[begin:end].contiguous()

    def bottom_gates(self, inputs: Tensor, gates: Tensor) -> None:
        """Writes inputs' share and bias of the bottom gates (K, B, G H); ``inputs`` as returned by :meth:`read`."""
        if self.places is None:
            project(inputs, self.from_input, self.layers[0].read_bias, gates)
        else:
            torch.index_select(self.table, 0, inputs.view(-1), out=gates.view(-1, gates.shape[2]))

    @functools.cached_property
    def table(self) -> Tensor:
        """Share of each distinct row in the bottom layer's gates, bias included: (N, 4H)."""
        return project(self.inputs, self.from_input, self.layers[0].read_bias)

    def mask(self, layer: int, begin: int, end: int) -> Tensor | None:
        """Returns the dropout mask of a layer's input in steps begin to end, (K, B, H) bool; None: no dropout."""
        mask = self.masks[layer]
        if mask is None:
            return None
        steps = mask[:, begin:end] if mask.shape[1] > 1 else mask.expand(-1, end - begin, -1)
        return steps.transpose(0, 1)

    def drop(self, layer: int, values: Tensor, begin: int, end: int) -> Tensor:
        """Applies dropout to a layer's input (K, B, H) in steps begin to end; also the transpose of this operation."""
        keep = self.mask(layer, begin, end)
        if keep is None or not values.is_cuda:
            return apply_dropout(values, keep, self.call.dropout)
        # One kernel instead of three.
        dropped: Tensor = torch.ops.aten.native_dropout_backward(values, keep, self.scale)
        return dropped

    def stack(self, h: Tensor, begin: int, end: int) -> tuple[list[Tensor], Tensor]:
        """Returns inputs of the upper layers and output of the stack in some steps, (K, B, H), for h (L, T, B, H)."""
        reads, top = [], h[0, begin:end]
        for layer in range(1, len(self.layers)):
            reads.append(self.drop(layer, top, begin, end))
            top = h[layer, begin:end]
            if self.call.residual:
                top = top + reads[-1]
        return reads, top

    def queries(self, top: Tensor) -> Tensor:
        """Returns the queries (K, B, A) of outputs of the stack (K, B, H)."""
        return top if self.query is None else project(top, self.query)
