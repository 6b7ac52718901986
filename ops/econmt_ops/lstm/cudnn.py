"""One LSTM layer in cuDNN, on weights that lie in its own layout."""

from __future__ import annotations

import torch
from torch import Tensor

_LSTM = 2
"""PyTorch's number for the LSTM among its recurrent cells."""

_PARTS = 4
"""Weights of one direction: input (4H, I), hidden (4H, H), and two biases (4H,)."""


def flatten(weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copies the weights of a layer into one buffer: the matrices of every direction, then the biases of every one.

    Where weights lie apart, PyTorch has cuDNN's buffer made at every call too, warns of it, and keeps the parts for
    the backward pass beside it.

    Args:
        weights: of one direction input (4H, I), hidden (4H, H) and two biases (4H,); then those of the other.

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
    buffer, views = flatten(weights)
    # cuDNN reads the buffer alone; the views are what gradients are given to.
    outputs, last_h, last_c, _, _ = torch._cudnn_rnn(
        inputs,
        views,
        _PARTS,
        buffer.detach(),
        h.contiguous(),
        c.contiguous(),
        _LSTM,
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
