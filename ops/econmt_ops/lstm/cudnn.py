"""One LSTM or GRU layer in cuDNN, with its weights in one contiguous buffer in cuDNN's layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

_LSTM, _GRU = 2, 3
"""PyTorch's mode numbers of these cells in `torch._cudnn_rnn`."""

_PARTS = 4
"""Number of weight tensors of one direction: input (G H, I), hidden (G H, H), and two biases (G H,), with G gates."""


MOST_STEPS = 1 << 15
"""Maximum steps of a call: 16,384 steps work, with 65,536 cuDNN returns CUDNN_STATUS_NOT_SUPPORTED."""


def by_direction(
    run: Callable[[Tensor, Tensor, Tensor, list[Tensor]], tuple[Tensor, Tensor, Tensor]],
    inputs: Tensor,
    h: Tensor,
    c: Tensor,
    weights: list[Tensor],
    most: int = MOST_STEPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs each direction of a layer separately, the second one from the last step to the first.

    Inputs are (B, T, I), h and c (D, B, H), ``weights`` as in `flatten`; ``run`` runs at most ``most`` steps of one
    direction.
    """
    outputs, states = [], []
    for number in range(len(h)):
        parts, at = weights[_PARTS * number : _PARTS * (number + 1)], slice(number, number + 1)
        made, last_h, last_c = [], h[at], c[at]
        for read in torch.split(inputs.flip(1) if number else inputs, most, 1):
            output, last_h, last_c = run(read, last_h, last_c, parts)
            made.append(output)
        joined = torch.cat(made, 1) if len(made) > 1 else made[0]
        outputs.append(joined.flip(1) if number else joined)
        states.append((last_h, last_c))
    last_h, last_c = (torch.cat(part) for part in zip(*states, strict=True))
    return torch.cat(outputs, 2), last_h, last_c


def flatten(weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copies weights, given as in `cudnn_lstm`, into one buffer: the matrices of all directions, then all biases.

    For weights that are separate in memory, PyTorch creates this buffer at every call too, warns about it, and
    additionally saves the weights for the backward pass. Also returns the weights as views of the buffer, through which
    gradients flow back to the arguments.
    """
    order = sorted(range(len(weights)), key=lambda number: number % _PARTS >= 2)
    buffer = torch.cat([weights[number].reshape(-1) for number in order])
    # One split instead of a slice per weight: its backward pass is one concatenation.
    parts = torch.split_with_sizes(buffer, [weights[number].numel() for number in order])
    views = dict(zip(order, parts, strict=True))
    return buffer, [views[number].view(weight.shape) for number, weight in enumerate(weights)]


def in_order(weights: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Returns the weights of a stack in the order of cuDNN's buffer: the matrices of all layers, then all biases."""
    return [part for layer in weights for part in layer[:2]] + [
        part for layer in weights for part in layer[2:]
    ]


def one_buffer(weights: Sequence[Tensor]) -> Tensor:
    """Returns weights, one after the other, as one vector: a view if they lie in memory like that, else a copy."""
    first, last = weights[0], weights[-1]
    size, begin = 0, first.data_ptr()
    for weight in weights:
        if weight.data_ptr() != begin + size * weight.itemsize or not weight.is_contiguous():
            break
        size += weight.numel()
    else:
        if first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr():
            return first.detach().as_strided((size,), (1,))
    with torch.no_grad():
        buffer: Tensor = torch._utils._flatten_dense_tensors(weights)  # type: ignore[no-untyped-call]
    return buffer


def move_together(weights: Sequence[Tensor]) -> None:
    """Moves parameters into one buffer, one after the other, if all are float32 parameters on a GPU."""
    if not all(
        type(weight) is nn.Parameter and weight.is_cuda and weight.dtype == torch.float32
        for weight in weights
    ):
        return
    parts = torch.split(one_buffer(weights), [weight.numel() for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part.view(weight.shape)


def cudnn_stack(
    inputs: Tensor, weights: Sequence[Sequence[Tensor]], state: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs a stack of LSTM layers in one direction by one call of cuDNN, which interleaves the layers.

    Takes inputs (B, T, I), of each layer (4H, I), (4H, H) and one or two biases (4H,), bottom first, and (h, c) of each
    layer, (1, B, H) each; empty for zeros. Returns outputs (B, T, H), and h and c after the last step, (L, B, H).
    """
    layers = len(weights)
    if len(weights[0]) < _PARTS:
        no_bias = torch.zeros_like(weights[0][2])
        weights = [(*layer, no_bias) for layer in weights]
    # cuDNN reads this buffer alone; the weights themselves are what gradients are given to.
    buffer = one_buffer(in_order(weights))
    if state:
        h, c = (torch.cat([pair[part].to(inputs.dtype) for pair in state]) for part in range(2))
    else:
        h = c = inputs.new_zeros(layers, inputs.shape[0], weights[0][1].shape[1])
    flat = [weight for layer in weights for weight in layer]
    sizes = _LSTM, h.shape[2], 0, layers, True  # no projection; batch first
    training = torch.is_grad_enabled()
    return torch._cudnn_rnn(inputs, flat, _PARTS, buffer, h, c, *sizes, 0.0, training, False, [], None)[:3]


def _layer(
    mode: int,
    inputs: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: list[Tensor],
    training: bool,
    bidirectional: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `torch.lstm` or `torch.gru` for one layer, without saving the weights in addition to the buffer.

    Takes PyTorch's number of the cell, inputs (B, T, I), h and c (D, B, H) with D directions (a GRU has no c), and for
    each direction input (G H, I), hidden (G H, H) and two biases (G H,). Returns outputs (B, T, D H), and h and c after
    the last step.
    """
    buffer, views = flatten(weights)
    # cuDNN reads only the buffer; the views receive the gradients.
    c = None if c is None else c.contiguous()
    given = inputs, views, _PARTS, buffer.detach(), h.contiguous(), c
    return torch._cudnn_rnn(*given, mode, h.shape[2], 0, 1, True, 0.0, training, bidirectional, [], None)[:3]


cudnn_lstm = functools.partial(_layer, _LSTM)
cudnn_gru = functools.partial(_layer, _GRU)
