"""The attentional LSTM in plain PyTorch: the definition that other implementations are held to.

Without input feeding nothing of the attention is recurrent, so the stack runs whole, then the attention of
all steps at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops import accounting
from econmt_ops.additive_attention.reference import additive_scores, attend
from econmt_ops.dropout import apply_dropout, layer_keep_masks
from econmt_ops.lstm.reference import lstm, lstm_cell
from econmt_ops.masking import padding_mask, zero_padding
from econmt_ops.precision import accumulate_dtype
from econmt_ops.weights import AttentionalLSTMState, AttentionalLSTMWeights


class _Attention:
    """From h of the top layer to o, for any number of steps.

    What does not depend on the step is done once, here.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        weights: AttentionalLSTMWeights,
        lengths: Tensor | None,
        layer_norm: tuple[Tensor, Tensor] | None,
        scale: float,
    ) -> None:
        self.padding = None if lengths is None else padding_mask(lengths, keys.shape[1], keys.device)
        self.keys = zero_padding(keys, self.padding)
        self.values = zero_padding(values, self.padding)
        self.weights = weights
        self.layer_norm = layer_norm
        self.scale = scale

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Returns o (B, T, H) and the attention (B, T, S), given h (B, T, H)."""
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


def _fed_steps(
    inputs: Tensor,
    attention: _Attention,
    state: AttentionalLSTMState,
    masks: list[Tensor | None],
    dropout: float,
    residual: bool,
) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
    """Runs the loop with input feeding."""
    bottom, *upper = attention.weights.layers
    size = inputs.shape[2]
    products = functional.linear(inputs, bottom.input[:, :size], bottom.bias)
    bottom_recurrent = torch.cat([bottom.input[:, size:], bottom.hidden], 1).t()
    upper_weights = [torch.cat([layer.input, layer.hidden], 1).t() for layer in upper]
    layers, fed = list(state.layers), state.output
    outputs, attentions = [], []
    for step, product in enumerate(products.unbind(1)):
        h, c = layers[0]
        h, c = lstm_cell(torch.addmm(product, torch.cat([fed, h], 1), bottom_recurrent), c)
        layers[0] = h, c
        read = h
        for number, (layer, weight) in enumerate(zip(upper, upper_weights, strict=True), start=1):
            mask = masks[number]
            if mask is not None:
                read = apply_dropout(read, mask[:, min(step, mask.shape[1] - 1)], dropout)
            h, c = layers[number]
            h, c = lstm_cell(torch.addmm(layer.bias, torch.cat([read, h], 1), weight), c)
            layers[number] = h, c
            read = h + read if residual else h
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
    *,
    lengths: Tensor | None,
    state: AttentionalLSTMState,
    input_feeding: bool,
    residual: bool,
    dropout: float,
    dropout_seed: int | None,
    variational: bool,
    layer_norm: tuple[Tensor, Tensor] | None,
    scale: float,
) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
    """See `econmt_ops.attentional_lstm`; all arguments are given, checked and cast."""
    attention = _Attention(keys, values, weights, lengths, layer_norm, scale)
    if input_feeding:
        batch, steps, _ = inputs.shape
        count, hidden = len(weights.layers), state.output.shape[1]
        masks = layer_keep_masks(
            count, batch, steps, hidden, dropout, dropout_seed, variational, inputs.device
        )
        return _fed_steps(inputs, attention, state, masks, dropout, residual)
    h, layers = lstm(
        inputs,
        weights.layers,
        state=state.layers,
        lengths=None,
        reverse=False,
        residual=residual,
        dropout=dropout,
        dropout_seed=dropout_seed,
        variational=variational,
    )
    outputs, attentions = attention(h)
    return outputs, attentions, AttentionalLSTMState(layers, outputs[:, -1])
