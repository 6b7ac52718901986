"""LSTM layers whose h is projected (Sak, Senior and Beaufays 2014), by torch.lstm: no kernel here has them.

    h_t = P (o tanh(c_t)), and the recurrent weights read this h.

B batch, T steps, I input size, H hidden, P features of the projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.weights import ProjectedLSTMWeights, State
from econmt_ops.lstm.reference import closing_weight, padding_columns
from econmt_ops.products.stack import StackOptions, last_of, run_cells


def _layer(
    inputs: Tensor, weights: ProjectedLSTMWeights, state: Any, lengths: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs one layer; see `econmt_ops.products.stack.RunLayer`."""
    h, c = state
    weight = weights.input
    if lengths is not None:
        padding = padding_mask(lengths, inputs.shape[1], inputs.device)
        inputs = padding_columns(zero_padding(inputs, padding), padding)
        weight = closing_weight(weights)
    flat = [weight, weights.hidden, weights.bias, torch.zeros_like(weights.bias), weights.projection]
    first = h.unsqueeze(0).contiguous(), c.unsqueeze(0).contiguous()
    training = torch.is_grad_enabled()
    outputs, last_h, last_c = torch.lstm(inputs, first, flat, True, 1, 0.0, training, False, True)
    last_h = last_h.reshape(h.shape) if lengths is None else last_of(outputs, h, lengths)
    return outputs, (last_h, last_c.reshape(c.shape))


def projected_lstm(
    inputs: Tensor,
    layers: tuple[ProjectedLSTMWeights, ...],
    *,
    state: State | None = None,
    lengths: Tensor | None = None,
    reverse: bool = False,
    residual: bool = False,
    dropout: float = 0.0,
    dropout_seed: Any = None,
    variational: bool = False,
    implementation: str = "auto",  # noqa: ARG001  there is only one
) -> tuple[Tensor, State]:
    """Runs a stack of layers; the arguments are those of `econmt_ops.lstm`, with h (B, P)."""
    options = StackOptions(lengths, reverse, residual, dropout, dropout_seed, variational)
    if state is None:
        zeros = [inputs.new_zeros(inputs.shape[0], size) for size in layers[0].projection.shape]
        state = (tuple(zeros),) * len(layers)
    return run_cells(_layer, inputs, layers, state, options)
