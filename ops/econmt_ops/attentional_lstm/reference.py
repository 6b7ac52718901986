"""Attentional LSTM in plain PyTorch: the definition that the other implementations are tested against.

Without input feeding no attention is recurrent, so the whole stack runs first, then the attention of all steps at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.additive_attention.reference import additive_scores, attend
from econmt_ops.attentional_lstm.options import DecoderOptions
from econmt_ops.cells import lstm as cell
from econmt_ops.core import scopes as accounting
from econmt_ops.core.dropout import apply_dropout, layer_keep_masks
from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.low_rank import columns
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.weights import (
    AnyLSTMWeights,
    AttentionalLSTMState,
    AttentionalLSTMWeights,
    LowRank,
    LowRankLSTMWeights,
)
from econmt_ops.dispatch.traits import Traits
from econmt_ops.lstm.reference import lstm

TRAITS = Traits()
"""Plain PyTorch under autograd."""


class _Attention:
    """Maps h of the top layer to o, for any number of steps.

    Everything that does not depend on the step is computed once in the constructor.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        weights: AttentionalLSTMWeights,
        options: DecoderOptions,
    ) -> None:
        lengths = options.lengths
        self.padding = None if lengths is None else padding_mask(lengths, keys.shape[1], keys.device)
        unclean = None if options.clean else self.padding
        # Contiguous, because query + keys inherits the strides of the keys: if time came first, the product with the
        # score weights would copy and save each sum.
        self.keys = zero_padding(keys, unclean).contiguous()
        self.values = zero_padding(values, unclean)
        self.weights, self.layer_norm, self.scale = weights, options.layer_norm, options.scale

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Returns o (B, T, H) and the attention weights (B, T, S) for h (B, T, H)."""
        with accounting.layer("attention"):
            query = h if self.weights.query is None else functional.linear(h, self.weights.query)
            if self.weights.score is None:
                scores = (
                    torch.bmm(query, self.keys.transpose(1, 2)).to(accumulate_dtype(h.dtype)) * self.scale
                )
            else:
                scores = additive_scores(query, self.keys, self.weights.score, self.layer_norm)
            context, attention = attend(scores, self.values, self.padding)
        combined = functional.linear(
            torch.cat([h, context], 2), self.weights.combine, self.weights.combine_bias
        )
        return combined.tanh(), attention


class _Recurrence:
    """Recurrent product of a layer's gates, from its input and its own previous h.

    Several steps use one product per step with a concatenated copy of both weights. A single step without gradients, as
    in a search, uses two products: the copy would take longer than it saves. Factorised weights use one product per
    right factor, then those with the left factors.
    """

    def __init__(self, layer: AnyLSTMWeights, begin: int, steps: int) -> None:
        """Takes a layer, the first column of its input weight that the recurrence reads, and the number of steps."""
        fed, hidden = columns(layer.input, begin, layer.input.shape[1]), layer.hidden
        self.bias, self.right = layer.bias, None
        if isinstance(fed, LowRank) and isinstance(hidden, LowRank):
            self.right = fed.right.t(), hidden.right.t()
            fed, hidden = fed.left, hidden.left
        assert isinstance(fed, Tensor)
        assert isinstance(hidden, Tensor)
        self.fed, self.hidden = fed.t(), hidden.t()
        concatenates = steps > 1 or torch.is_grad_enabled()
        self.joined = torch.cat([fed, hidden], 1).t() if concatenates else None

    def __call__(self, start: Tensor | None, fed: Tensor, h: Tensor) -> Tensor:
        """Returns the gates (B, 4H) from ``fed`` and h (B, H).

        ``start`` is the other inputs' share of the gates with the bias, (B, 4H), or of the right factor's product,
        (B, r); None: there is none.
        """
        if self.right is not None:
            right, right_h = self.right
            fed = fed @ right if start is None else torch.addmm(start, fed, right)
            h, start = h @ right_h, None
        start = self.bias if start is None else start
        if self.joined is None:
            return torch.addmm(start, fed, self.fed).addmm_(h, self.hidden)
        return torch.addmm(start, torch.cat([fed, h], 1), self.joined)


def _run_input_feeding(
    inputs: Tensor, attention: _Attention, state: AttentionalLSTMState, options: DecoderOptions
) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
    """Runs the loop over the steps with input feeding."""
    layers, fed = list(state.layers), state.output
    bottom, *upper = attention.weights.layers
    (batch, steps, size), dropout = inputs.shape, options.dropout
    masks = layer_keep_masks(
        len(layers),
        batch,
        steps,
        fed.shape[1],
        dropout,
        options.seed,
        options.variational,
        inputs.device,
    )
    if isinstance(bottom, LowRankLSTMWeights):
        products = functional.linear(inputs, bottom.input.right[:, :size])
    else:
        products = functional.linear(inputs, bottom.input[:, :size], bottom.bias)
    bottom_gates = _Recurrence(bottom, size, steps)
    upper_gates = [_Recurrence(layer, 0, steps) for layer in upper]
    outputs, attentions = [], []
    for step, product in enumerate(products.unbind(1)):
        h, c = layers[0]
        h, c = cell.forward(bottom_gates(product, fed, h), c)
        layers[0] = h, c
        read = h
        for number, gates in enumerate(upper_gates, start=1):
            mask = masks[number]
            if mask is not None:
                read = apply_dropout(read, mask[:, min(step, mask.shape[1] - 1)], dropout)
            h, c = layers[number]
            h, c = cell.forward(gates(None, read, h), c)
            layers[number] = h, c
            read = h + read if options.residual else h
        output, alpha = attention(read.unsqueeze(1))
        fed = output.squeeze(1)
        outputs.append(output)
        attentions.append(alpha)
    return torch.cat(outputs, 1), torch.cat(attentions, 1), AttentionalLSTMState(tuple(layers), fed)


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
    h, layers = lstm(inputs, weights.layers, state.layers, options.stack())
    outputs, attentions = attention(h)
    return outputs, attentions, AttentionalLSTMState(layers, outputs[:, -1])
