"""The LSTM on a GPU with persistent kernels: one launch runs all steps of a layer, with its weights kept on chip.

Layers that no persistent kernel supports (factorised, float64, IEEE float32, more than 1,600 units, a device too small)
run step by step as in `recompute`. Large products use matrices of `even` width.

Sizes: D directions, B batch, T steps, I input size, H hidden. Internally time is the first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops.backends.triton import MOST_UNITS, interpreted, serves, with_kernels
from econmt_ops.core.precision import recurrent_tf32
from econmt_ops.core.repeated import Inputs, UniqueRows, values_of
from econmt_ops.core.stack import StackOptions, run_stack
from econmt_ops.core.weights import AnyLSTMWeights, LSTMState, LSTMWeights
from econmt_ops.dispatch.registration import Gradients, Incoming, RecurrentOperator
from econmt_ops.lstm import direct, recompute
from econmt_ops.lstm.persistent_layer import PersistentLayer
from econmt_ops.lstm.persistent_passes import Walked, empty_results, run_backward, run_forward

TRAITS = with_kernels(
    recompute.TRAITS, model_stash="attention", serves=lambda sizes, _: sizes["H"] <= MOST_UNITS
)


def _forward(layer: PersistentLayer, keep: bool) -> Walked:
    return run_forward(layer, keep, layer.inputs.dtype)[0]


def _backward(layer: PersistentLayer, result: Walked, incoming: Incoming) -> Gradients:
    return run_backward(layer, result, incoming, layer.inputs.dtype)


def _saves(_layer: PersistentLayer) -> set[str]:
    """Returns the names of the tensors that the backward pass reads: all but the last states."""
    return {*PersistentLayer._fields, "outputs", "cells", "sums"}


_operator = RecurrentOperator(
    "econmt_ops::persistent_lstm_layer",
    PersistentLayer,
    Walked,
    forward=_forward,
    fake=empty_results,
    backward=_backward,
    saves=_saves,
    constants=lambda layer: () if layer.gate_gradient is None else ("weights", "recurrents", "biases"),
)


def products_type(inputs: Tensor) -> torch.dtype | None:
    """Returns the type of the products in a layer's recurrence, or None if no persistent kernel supports the inputs.

    float32 is supported where TF32 is allowed, with products in float16, which has TF32's precision in half the space;
    gradients are scaled into its range. Where TF32 is not allowed, float32 products have to be exact.
    """
    if inputs.dtype in (torch.bfloat16, torch.float16):
        return inputs.dtype
    if inputs.dtype != torch.float32:
        return None
    if interpreted():
        return torch.float32
    return torch.float16 if recurrent_tf32() else None


def products_of(inputs: Inputs, layers: Sequence[AnyLSTMWeights]) -> torch.dtype | None:
    """Returns `products_type`, or None if no launch fits the device."""
    from econmt_ops.backends.triton.persistent import limits_of, plan

    values = values_of(inputs)
    products = products_type(values)
    if products is None or not all(isinstance(layer, LSTMWeights) for layer in layers):
        return None
    batch = len(inputs.places if isinstance(inputs, UniqueRows) else inputs)
    limits = limits_of(values.device)
    fits = (plan(batch, layers[0].hidden.shape[1], products, limits, back=back) for back in (False, True))
    return products if all(partition is not None for partition in fits) else None


def _steps(inputs: Inputs) -> str:
    """Returns the backend of layers that run step by step."""
    return "triton" if serves(values_of(inputs)) else "eager"


def _run_layer(
    inputs: Inputs,
    layers: Sequence[AnyLSTMWeights],
    state: Sequence[tuple[Tensor, Tensor]],
    lengths: Tensor | None,
    reverse: Sequence[bool],
    stash: str,
    products: torch.dtype,
    together: str = "auto",
    gate_gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one layer; returns outputs (B, T, D H), and h and c (D, B, H) after each row's last step."""
    values = values_of(inputs)
    if lengths is not None:
        lengths = lengths.to(values.device, non_blocking=True).contiguous()
    weights: list[Any] = [part for layer in layers for part in layer]
    firsts = [part for pair in state for part in pair]
    if isinstance(inputs, Tensor) and gate_gradient is None and direct.is_plain([inputs, *weights, *firsts]):
        name = str(products).removeprefix("torch.")
        call = direct.LayerCall(inputs.dtype, name, stash, tuple(reverse), together, lengths, 1)
        h, c = (torch.stack(parts) for parts in zip(*state, strict=True)) if state else (None, None)
        return direct.run_layer(call, inputs, h, c, weights)
    result = _operator(
        PersistentLayer(
            values if isinstance(inputs, UniqueRows) else values.transpose(0, 1),
            [layer.input for layer in layers if isinstance(layer, LSTMWeights)],
            [layer.hidden for layer in layers if isinstance(layer, LSTMWeights)],
            [layer.bias for layer in layers],
            [h for h, _ in state],
            [c for _, c in state],
            lengths,
            inputs.places.t() if isinstance(inputs, UniqueRows) else None,
            list(reverse),
            stash,
            str(products).removeprefix("torch."),
            together,
            gate_gradient,
        )
    )
    return result.outputs.transpose(0, 1), result.last_h, result.last_c


def lstm(
    inputs: Inputs,
    layers: tuple[AnyLSTMWeights, ...],
    state: LSTMState,
    options: StackOptions,
    *,
    stash: str = "gates",
) -> tuple[Tensor, LSTMState]:
    """Implements `econmt_ops.lstm` for checked arguments, cast except for the weights."""
    products = products_of(inputs, layers)
    if products is None:
        return recompute.lstm(inputs, layers, state, options, stash=stash, backend=_steps(inputs))

    def run(number: int, read: Inputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        first = [] if options.from_zero else [state[number]]
        outputs, last_h, last_c = _run_layer(
            read,
            [layers[number]],
            first,
            options.lengths,
            [options.reverse],
            stash,
            products,
            gate_gradient=options.gate_gradient,
        )
        return outputs, (last_h.squeeze(0), last_c.squeeze(0))  # squeeze: its backward launches no kernel

    outputs, last = run_stack(run, inputs, len(layers), options)
    return outputs, tuple(last)


def bidirectional_lstm(
    inputs: Inputs,
    forward: AnyLSTMWeights,
    backward: AnyLSTMWeights,
    *,
    lengths: Tensor | None,
    stash: str = "gates",
    together: str = "auto",
) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Implements `econmt_ops.bidirectional_lstm` for checked arguments, cast except for the weights.

    ``together``: "yes" or "no", whether both directions share a launch, or "auto".
    """
    layers = [forward, backward]
    products = products_of(inputs, layers)
    if products is None:
        return recompute.bidirectional_lstm(
            inputs, forward, backward, lengths=lengths, stash=stash, backend=_steps(inputs)
        )
    outputs, h, c = _run_layer(inputs, layers, [], lengths, [False, True], stash, products, together)
    return outputs, ((h[0], c[0]), (h[1], c[1]))
