"""The LSTM in plain PyTorch: the definition that the other implementations are tested against.

In float32 and float64 a layer is torch.lstm (oneDNN on the CPU, cuDNN on the GPU), which on the CPU is faster than a
loop of steps and than packed sequences, forward and backward, at all sizes measured (B 64 and 128, T 15 and 50, H 256
and 512). torch.lstm does not support lengths here, so its inputs get a *closed gate column*: an extra input, 1 at
padded positions, whose weights close the input and output gates and open the forget gate. There c is unchanged and h is
exactly 0. torch.lstm keeps c in the type of the inputs, so in bfloat16 and float16 a layer is a loop of steps with c in
float32; so is a layer with factorised matrices, in every type.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from econmt_ops.backends.triton import MOST_UNITS
from econmt_ops.cells import lstm as cell
from econmt_ops.core.lengths import padding_of, zero_padding
from econmt_ops.core.precision import accumulate_dtype, recurrent_tf32
from econmt_ops.core.weights import AnyLSTMWeights, LSTMState, LSTMWeights, ProjectedLSTMWeights
from econmt_ops.dispatch.rule import MODE, needs_single_steps
from econmt_ops.lstm.cudnn import MOST_STEPS, by_direction, cudnn_lstm
from econmt_ops.products.dropout import Seed, apply_dropout
from econmt_ops.products.low_rank import linear, linear_add
from econmt_ops.products.stack import StackOptions, last_of, run_stack

CLOSED = 1e4
"""Magnitude of closed gates' sums, as in padding; sigmoid(-1e4) is 0, sigmoid(1e4) is 1, and both slopes are 0."""

COLUMNS = 8
"""Input columns that closed gates take: one or two would suffice, eight keep rows aligned for tensor cores."""

_LITTLE = 16 << 20
"""Bytes of gates up to which the memory saved by recomputation is negligible."""

_SMALL = 96
"""Units up to which cuDNN's layer in TF32 is faster than ours. On an H200, 16 rows, both passes: 0.381 and 0.697 ms for
200 steps of 96 units; but 0.462 and 0.367 for 100 steps of 128 units."""

_MANY_ROWS = 256
"""Rows from which it is not: 0.699 and 0.399 ms of 50 steps of 512 rows of 96 units."""

_WIDE = 1024
"""Units from which, on the CPU, oneDNN's LSTM takes longer to pack its weights than a loop of a few steps takes."""

_FEW_STEPS = 16
"""Steps up to which a loop in 16-bit types does not profit from packed weights."""

_UNITS, _STATES = range(256, MOST_UNITS + 1), range(8192, 1 << 18)
"""Units, and values of h, for which steps in IEEE float32 in a CUDA graph take less time than cuDNN's layer.

On an H200, both passes of 100 steps of 64 rows: 9.72 and 12.99 ms of 1,024 units, 4.12 and 4.84 of 512, 2.50 and 3.07
of 256; but 1.85 and 0.62 of 128 units, and 31.2 and 30.5 of 256 rows of 1,024.
"""


def is_light(batch: int, steps: int, hidden: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if the reference is faster than recomputing and, on a CPU, saves little memory for backward.

    On a GPU in IEEE float32 it is cuDNN's layer, which holds its weights in registers for all steps; no launch of ours
    has room for them in that type. In a CUDA graph single steps are faster where there are many units. With TF32 it is
    cuDNN's layer for few units, and for more than a launch has room for. ``dtype`` is the compute type.
    """
    if torch.compiler.is_compiling():
        return False
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        served = dtype == torch.float32 and cudnn.enabled and cudnn.is_available()  # type: ignore[no-untyped-call]
        if served and hidden <= MOST_UNITS and recurrent_tf32():
            return hidden <= _SMALL and batch < _MANY_ROWS
        return served and not (MODE.captured and hidden in _UNITS and batch * hidden in _STATES)
    if device.type != "cpu":
        return False
    exact = accumulate_dtype(dtype)
    if batch * steps * 4 * hidden * exact.itemsize > _LITTLE:
        return False
    return hidden < _WIDE if exact == dtype else steps < _FEW_STEPS


def runs_by_torch(dtype: torch.dtype) -> bool:
    """Returns True if a layer runs as torch's own, which accumulates in ``dtype``, and not as a loop of steps."""
    return accumulate_dtype(dtype) == dtype and not needs_single_steps()


def closed_gates(layer: AnyLSTMWeights | ProjectedLSTMWeights) -> Tensor:
    """Returns the sums (4H,) of the gates i, f, g, o that padded positions read."""
    # Filled on the device: copying a list of numbers to a GPU would synchronise with it.
    pattern = layer.bias.new_full((4, layer.bias.shape[0] // 4), -CLOSED)
    pattern[1].fill_(CLOSED)
    pattern[2].zero_()
    return pattern.view(-1)


def steps_of_torch(
    inputs: Tensor, h: Tensor, c: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes one direction of torch.lstm by operators that fake tensors on a GPU support.

    They support cuDNN's LSTM too, but not its backward pass, because only cuDNN knows the size of its reserve buffer.
    """
    layer = LSTMWeights(weights[0], weights[1], weights[2] + weights[3])
    outputs, last_h, last_c = _layer_by_steps(inputs, layer, h[0], c[0], None)
    return outputs, last_h.unsqueeze(0), last_c.unsqueeze(0)


def layer_by_torch(
    inputs: Tensor,
    directions: Sequence[LSTMWeights | ProjectedLSTMWeights],
    h: Tensor,
    c: Tensor,
    padding: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one layer by torch.lstm; returns outputs (B, T, D H), and h and c (D, B, H) after the last step.

    Inputs (B, T, I) are finite at padded positions, where ``padding`` (B, T) closes the gates. That works for the
    backward direction too: it starts in the padding and carries its zero state to the row's last position.
    """
    # Further columns mark padded positions, and their weights leave the state unchanged there.
    wider, weights = (0, COLUMNS - 1), []
    if padding is not None:
        inputs = torch.cat([inputs, functional.pad(padding.unsqueeze(2).to(inputs.dtype), wider)], 2)
    for layer in directions:
        weight = layer.input
        if padding is not None:
            weight = torch.cat([weight, functional.pad(closed_gates(layer).unsqueeze(1), wider)], 1)
        weights += [weight, layer.hidden, layer.bias, torch.zeros_like(layer.bias)]
    # Without gradients torch then saves nothing for a backward pass.
    training, bidirectional, first = torch.is_grad_enabled(), len(directions) == 2, directions[0]
    if isinstance(first, ProjectedLSTMWeights):
        weights.append(first.projection)
    elif inputs.is_cuda and not torch.compiler.is_compiling():
        if isinstance(inputs, FakeTensor):
            return by_direction(steps_of_torch, inputs, h, c, weights)
        if torch.cudnn_is_acceptable(inputs):
            if inputs.shape[1] > MOST_STEPS:
                return by_direction(functools.partial(cudnn_lstm, training=training), inputs, h, c, weights)
            return cudnn_lstm(inputs, h, c, weights, training, bidirectional)
    state = (h.contiguous(), c.contiguous())  # cuDNN requires it, in a compiled graph too
    outputs, last_h, last_c = torch.lstm(inputs, state, weights, True, 1, 0.0, training, bidirectional, True)
    # The decomposition that torch.compile traces returns states with an extra axis in torch 2.11.
    return outputs, last_h.reshape(h.shape), last_c.reshape(c.shape)


def _layer_by_steps(
    inputs: Tensor,
    layer: AnyLSTMWeights,
    h: Tensor,
    c: Tensor,
    padding: Tensor | None,
    gate_gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if gate_gradient is not None:
        assert isinstance(layer, LSTMWeights)
        layer = LSTMWeights(*(part.detach() for part in layer))
    products = linear(inputs, layer.input, layer.bias)
    if gate_gradient is not None:
        products = products + gate_gradient.transpose(0, 1)
    if padding is not None:
        products = torch.where(padding.unsqueeze(2), closed_gates(layer), products)
    outputs = []
    for product in products.unbind(1):
        h, c = cell.forward(linear_add(product, h, layer.hidden), c)
        outputs.append(h)
    return torch.stack(outputs, 1), h, c


def lstm(
    inputs: Tensor,
    layers: tuple[AnyLSTMWeights | ProjectedLSTMWeights, ...],
    state: LSTMState,
    options: StackOptions,
) -> tuple[Tensor, LSTMState]:
    """Implements `econmt_ops.lstm` and `econmt_ops.bidirectional_lstm` for checked and cast arguments."""
    batch, steps, _ = inputs.shape
    lengths = options.lengths
    if options.both_ways:
        return _both_ways(inputs, layers, state, lengths)
    padding = padding_of(inputs, lengths)
    shape = batch, steps, layers[0].hidden.shape[1]
    masks = options.keep_masks(len(layers), shape, inputs.device)
    by_torch = options.gate_gradient is None and runs_by_torch(inputs.dtype)
    inputs = zero_padding(inputs, padding)

    def drop(read: Tensor, number: int) -> Tensor:
        return apply_dropout(read, masks[number], options.dropout)

    def run(number: int, read: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state[number]
        layer = layers[number]
        if isinstance(layer, ProjectedLSTMWeights) or (by_torch and isinstance(layer, LSTMWeights)):
            outputs, last_h, last_c = layer_by_torch(read, [layer], h.unsqueeze(0), c.unsqueeze(0), padding)
            last_h, last_c = last_h.squeeze(0), last_c.squeeze(0)
        else:
            outputs, last_h, last_c = _layer_by_steps(read, layer, h, c, padding, options.gate_gradient)
        return outputs, (last_h if lengths is None else last_of(outputs, h, lengths), last_c)

    outputs, last = run_stack(run, inputs, len(layers), options, reverses=options.reverse, drop=drop)
    return outputs, tuple(last)


def _both_ways(
    inputs: Tensor, layers: Sequence[Any], state: LSTMState, lengths: Tensor | None
) -> tuple[Tensor, LSTMState]:
    """Runs one layer in both directions from a state of zeros."""
    whole = [layer for layer in layers if isinstance(layer, LSTMWeights)]
    if not whole or not runs_by_torch(inputs.dtype):
        pairs = zip(layers, (False, True), strict=True)
        both = [lstm(inputs, (layer,), state[:1], StackOptions(lengths, reverse)) for layer, reverse in pairs]
        return torch.cat([outputs for outputs, _ in both], 2), (both[0][1][0], both[1][1][0])
    padding = padding_of(inputs, lengths)
    zeros = inputs.new_zeros(2, *state[0][0].shape)
    outputs, last_h, last_c = layer_by_torch(zero_padding(inputs, padding), whole, zeros, zeros, padding)
    ahead = last_h[0] if lengths is None else last_of(outputs.chunk(2, 2)[0], zeros[0], lengths)
    return outputs, ((ahead, last_c[0]), (last_h[1], last_c[1]))


def projected_lstm(
    inputs: Tensor,
    layers: tuple[ProjectedLSTMWeights, ...],
    *,
    state: LSTMState | None = None,
    dropout_seed: Seed | None = None,
    implementation: str = "auto",  # noqa: ARG001  there is only one
    **options: Any,
) -> tuple[Tensor, LSTMState]:
    """Runs layers whose h is projected (Sak, Senior and Beaufays 2014), by torch.lstm: no kernel here has them.

    h_t is P (o tanh(c_t)), which the recurrent weights read. Arguments are those of `econmt_ops.lstm`.
    """
    if state is None:
        h, c = (inputs.new_zeros(inputs.shape[0], size) for size in layers[0].projection.shape)
        state = ((h, c),) * len(layers)
    return lstm(inputs, layers, state, StackOptions(seed=dropout_seed, **options))
