"""Attentional LSTM in plain PyTorch: the definition that the other implementations are tested against.

Without input feeding no attention is recurrent, so the whole stack runs first, then the attention of all steps at once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.additive_attention.reference import additive_scores, attend
from econmt_ops.cells import lstm as cell
from econmt_ops.cells.coverage import coverage_forward
from econmt_ops.cells.lstm import LSTM
from econmt_ops.cells.output import output_forward
from econmt_ops.cells.protocol import StepCell
from econmt_ops.cells.table import cell_of
from econmt_ops.core import scopes as accounting
from econmt_ops.core.lengths import padding_of, zero_padding
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.weights import (
    AttentionalLSTMState,
    AttentionalLSTMWeights,
    DecoderLayer,
    LowRank,
    LowRankLSTMWeights,
)
from econmt_ops.layers import stepped
from econmt_ops.lstm.reference import lstm
from econmt_ops.products.dropout import apply_dropout
from econmt_ops.products.low_rank import columns
from econmt_ops.products.stack import StackOptions, run_cells


class DecoderOptions(NamedTuple):
    """Options of a decoder and of its layers alone, complete and checked; see `econmt_ops.attentional_lstm`."""

    lengths: Tensor | None
    stack: StackOptions = StackOptions()
    input_feeding: bool = True
    layer_norm: tuple[Tensor, Tensor] | None = None
    scale: float = 1.0
    clean: bool = False
    overwrites: bool = False


class _Attention:
    """Maps h of the top layer to o, for any number of steps.

    Everything that does not depend on the step is computed once in the constructor.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, weights: AttentionalLSTMWeights, options: DecoderOptions
    ) -> None:
        self.padding = padding_of(keys, options.lengths)
        unclean = None if options.clean else self.padding
        # Contiguous, because query + keys inherits the strides of the keys: if time came first, the product with the
        # score weights would copy and save each sum.
        self.keys = zero_padding(keys, unclean).contiguous()
        self.values = zero_padding(values, unclean)
        self.weights, self.layer_norm, self.scale = weights, options.layer_norm, options.scale

    def __call__(self, h: Tensor, coverage: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns o (B, T, H) and the attention weights (B, T, S) for h (B, T, H).

        With ``coverage`` (B, S, W), that before the step, T is 1.
        """
        with accounting.layer("attention"):
            query = h if self.weights.query is None else functional.linear(h, self.weights.query)
            if self.weights.score is None:
                scores = (
                    torch.bmm(query, self.keys.transpose(1, 2)).to(accumulate_dtype(h.dtype)) * self.scale
                )
            else:
                keys = self.keys
                if self.weights.coverage is not None and coverage is not None:
                    keys = keys + functional.linear(
                        coverage, self.weights.coverage.key.to(coverage.dtype)
                    ).to(keys.dtype)
                scores = additive_scores(query, keys, self.weights.score, self.layer_norm)
            context, attention = attend(scores, self.values, self.padding)
        return combined_output(h, context, self.weights), attention

    def next_coverage(self, before: Tensor | None, attention: Tensor, h: Tensor) -> Tensor | None:
        """Returns the coverage after a step from that before it, the step's weights (B, S) and h (B, H)."""
        coverage = self.weights.coverage
        if coverage is None or before is None:
            return None
        exact = before.dtype
        state = None if coverage.state is None else functional.linear(h, coverage.state).to(exact)
        attended, recurrent = (
            None if part is None else part.to(exact) for part in (coverage.attention, coverage.recurrent)
        )
        shares = zero_padding(coverage.shares.to(exact), self.padding)
        weights = coverage._replace(shares=shares, attention=attended, recurrent=recurrent)
        after = coverage_forward(weights, before, attention.to(exact), state)
        return after if self.padding is None else after.masked_fill(self.padding.unsqueeze(2), 0.0)


def combined_output(h: Tensor, context: Tensor, weights: AttentionalLSTMWeights) -> Tensor:
    """Returns o (B, T, H) from the stack's output h (B, T, H) and the contexts (B, T, E)."""
    gate, hidden = weights.gate, h.shape[2]
    if gate is None:
        combined = functional.linear(torch.cat([h, context], 2), weights.combine, weights.combine_bias)
        if weights.output_norm is None:
            return combined.tanh()
        return output_forward(combined, combined.new_zeros(()), None, weights.output_norm)
    assert weights.combine_bias is not None
    matrix = torch.cat([gate.weight, weights.combine])
    share = functional.linear(h, matrix[:, :hidden], torch.cat([gate.bias, weights.combine_bias]))
    read = functional.linear(context, matrix[:, hidden:])
    return output_forward(share, read, gate.context_bias, weights.output_norm)


class _CellStep:
    """Step of a layer of any other cell, by a product with its input and one with its own previous h."""

    def __init__(self, layer: DecoderLayer, begin: int, steps: int) -> None:  # noqa: ARG002 - as `_LSTMStep`
        """Takes a layer, the first column of its input weight that the recurrence reads, and the number of steps."""
        self.cell: StepCell = cell_of(layer)
        self.parts = self.cell.split(layer)
        self.input = self.parts.input[:, begin:]

    def shares(self, inputs: Tensor) -> Tensor:
        """Returns the share (B, T, G H) of inputs that the recurrence does not read, with the bias."""
        size = inputs.shape[2]
        return functional.linear(inputs, self.parts.input[:, :size], self.parts.read_bias)

    def __call__(self, start: Tensor | None, read: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns the states after a step; ``start`` (B, G H): the other inputs' share, or None."""
        product = functional.linear(read, self.input, self.parts.read_bias if start is None else None)
        recurrent = functional.linear(state[0], self.parts.hidden, self.parts.recurrent_bias)
        exact = accumulate_dtype(read.dtype)
        extra = [part.to(exact) for part in self.parts.extra]
        return self.cell.forward(product if start is None else start + product, recurrent, state, extra)


class _LSTMStep:
    """Step of an LSTM layer; see `_CellStep`.

    Several steps use one product per step with a concatenated copy of both weights. A single step without gradients, as
    in a search, uses two products: the copy would take longer than it saves. Factorised weights use one product per
    right factor, then those with the left factors.
    """

    def __init__(self, layer: Any, begin: int, steps: int) -> None:
        """See `_CellStep`."""
        fed, hidden = columns(layer.input, begin, layer.input.shape[1]), layer.hidden
        self.layer, self.right = layer, None
        if isinstance(fed, LowRank) and isinstance(hidden, LowRank):
            self.right = fed.right.t(), hidden.right.t()
            fed, hidden = fed.left, hidden.left
        assert isinstance(fed, Tensor)
        assert isinstance(hidden, Tensor)
        self.fed, self.hidden = fed.t(), hidden.t()
        concatenates = steps > 1 or torch.is_grad_enabled()
        self.joined = torch.cat([fed, hidden], 1).t() if concatenates else None

    def shares(self, inputs: Tensor) -> Tensor:
        """Returns the share (B, T, 4H) of inputs with the bias, or that of the right factor's product, (B, T, r)."""
        size = inputs.shape[2]
        if isinstance(self.layer, LowRankLSTMWeights):
            return functional.linear(inputs, self.layer.input.right[:, :size])
        return functional.linear(inputs, self.layer.input[:, :size], self.layer.bias)

    def __call__(self, start: Tensor | None, read: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns the states after a step."""
        h, c = state
        if self.right is not None:
            right, right_h = self.right
            read = read @ right if start is None else torch.addmm(start, read, right)
            h, start = h @ right_h, None
        start = self.layer.bias if start is None else start
        if self.joined is None:
            return cell.forward(torch.addmm(start, read, self.fed).addmm_(h, self.hidden), c)
        return cell.forward(torch.addmm(start, torch.cat([read, h], 1), self.joined), c)


def _run_input_feeding(
    inputs: Tensor, attention: _Attention, state: AttentionalLSTMState, options: DecoderOptions
) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
    """Runs the loop over the steps with input feeding."""
    layers, fed = list(state.layers), state.output
    (batch, steps, size), stack = inputs.shape, options.stack
    masks = stack.keep_masks(len(layers), (batch, steps, fed.shape[1]), inputs.device)
    weights = attention.weights.layers
    kind = _LSTMStep if cell_of(weights[0]) is LSTM else _CellStep
    bottom, *upper = (kind(layer, 0 if number else size, steps) for number, layer in enumerate(weights))
    coverage = state.coverage
    outputs, attentions = [], []
    for step, product in enumerate(bottom.shares(inputs).unbind(1)):
        layers[0] = bottom(product, fed, layers[0])
        read = layers[0][0]
        for number, advance in enumerate(upper, start=1):
            mask = masks[number]
            if mask is not None:
                read = apply_dropout(read, mask[:, min(step, mask.shape[1] - 1)], stack.dropout)
            layers[number] = advance(None, read, layers[number])
            read = layers[number][0] + read if stack.residual else layers[number][0]
        output, alpha = attention(read.unsqueeze(1), coverage)
        coverage = attention.next_coverage(coverage, alpha.squeeze(1), read)
        fed = output.squeeze(1)
        outputs.append(output)
        attentions.append(alpha)
    after = AttentionalLSTMState(tuple(layers), fed, coverage)
    return torch.cat(outputs, 1), torch.cat(attentions, 1), after


def attentional_lstm(
    inputs: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: AttentionalLSTMWeights,
    state: AttentionalLSTMState,
    options: DecoderOptions,
) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
    """Implements `econmt_ops.attentional_lstm` for checked and cast arguments."""
    attention = _Attention(keys, values, weights, options)
    if options.input_feeding:
        return _run_input_feeding(inputs, attention, state, options)
    kind = cell_of(weights.layers[0])
    of_cells = functools.partial(run_cells, functools.partial(stepped.reference, kind))
    run: Any = lstm if kind is LSTM else of_cells
    h, layers = run(inputs, weights.layers, state.layers, options.stack)
    outputs, attentions = attention(h)
    return outputs, attentions, AttentionalLSTMState(layers, outputs[:, -1])
