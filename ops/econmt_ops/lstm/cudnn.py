"""One LSTM or GRU layer in cuDNN, on weights that lie in its own layout."""

from __future__ import annotations

import torch
from torch import Tensor

_LSTM, _GRU = 2, 3
"""PyTorch's numbers for them among its recurrent cells."""

_PARTS = 4
"""Weights of one direction: input (G H, I), hidden (G H, H), and two biases (G H,), with G gates."""


def flatten(weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copies the weights of a layer into one buffer: the matrices of every direction, then the biases of every one.

    Where weights lie apart, PyTorch has cuDNN's buffer made at every call too, warns of it, and keeps the parts for
    the backward pass beside it.

    Args:
        weights: of one direction input (G H, I), hidden (G H, H) and two biases (G H,); then those of the other.

    Returns:
        The buffer, and the weights as views of it, through which gradients flow back to the arguments.
    """
    order = [number for number in range(len(weights)) if number % _PARTS < 2]
    order += [number for number in range(len(weights)) if number % _PARTS >= 2]
    buffer = torch.cat([weights[number].reshape(-1) for number in order])
    # One split and not a slice a weight: its backward pass is one concatenation.
    parts = torch.split_with_sizes(buffer, [weights[number].numel() for number in order])
    views = dict(zip(order, parts, strict=True))
    return buffer, [views[number].view(weight.shape) for number, weight in enumerate(weights)]


def cudnn_lstm(
    inputs: Tensor,
    h: Tensor,
    c: Tensor,
    weights: list[Tensor],
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `torch.lstm` gives for one layer with biases, without a copy of the weights beside the buffer.

    Args:
        inputs: (B, T, I), or (T, B, I) unless ``batch_first``.
        h: (D, B, H) with D directions.
        c: (D, B, H).
        weights: as in `flatten`.
        training: whether a backward pass may follow.
        bidirectional: whether there are two directions.
        batch_first: see ``inputs``.

    Returns:
        outputs as the inputs with D H values at each position, and h and c after the last step, each (D, B, H).
    """
    return _rnn(_LSTM, inputs, h, c.contiguous(), weights, training, bidirectional, batch_first)


def cudnn_gru(inputs: Tensor, h: Tensor, weights: list[Tensor], training: bool) -> Tensor:
    """The outputs (B, T, H) of `torch.gru` for one layer in one direction, likewise.

    Args:
        inputs: (B, T, I). h: (1, B, H).
        weights: as in `flatten`.
        training: whether a backward pass may follow.
    """
    return _rnn(_GRU, inputs, h, None, weights, training, False, True)[0]


def _rnn(
    mode: int,
    inputs: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: list[Tensor],
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and h and c after the last step."""
    buffer, views = flatten(weights)
    # cuDNN reads the buffer alone; the views are what gradients are given to.
    outputs, last_h, last_c, _, _ = torch._cudnn_rnn(
        inputs,
        views,
        _PARTS,
        buffer.detach(),
        h.contiguous(),
        c,
        mode,
        h.shape[2],
        0,
        1,
        batch_first,
        0.0,
        training,
        bidirectional,
        [],
        None,
    )
    return outputs, last_h, last_c
