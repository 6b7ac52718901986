"""The LSTM on a GPU with persistent kernels: one launch runs all steps of a layer, with its weights kept on chip.

Layers that no persistent kernel supports (factorised, float64, IEEE float32, more than 1,600 units, a device too small)
run step by step as in `recompute`. Large products use matrices of `even` width. Calls that torch.compile or others look
into go through an operator of torch.library, others through `eager_layer`.

Sizes: D directions, B batch, T steps, I input size, H hidden. Internally time is the first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from econmt_ops.backends.triton import interpreted, with_kernels
from econmt_ops.core.precision import recurrent_tf32
from econmt_ops.core.weights import AnyLSTMWeights, LSTMState, LSTMWeights
from econmt_ops.dispatch.device_limits import limits_of
from econmt_ops.dispatch.registration import Gradients, Incoming
from econmt_ops.lstm import recompute
from econmt_ops.lstm.direction import LSTMArguments, LSTMResults, empty_results, layer_operator, run_layer
from econmt_ops.lstm.eager_layer import is_plain, run_eagerly
from econmt_ops.lstm.persistent_layer import LayerPlan, plan_of
from econmt_ops.lstm.persistent_operands import LayerSettings, LayerTensors
from econmt_ops.products.repeated import Inputs, UniqueRows, values_of
from econmt_ops.products.stack import StackOptions, run_stack

TRAITS = with_kernels(recompute.TRAITS, model_stash="attention")


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
    from econmt_ops.backends.triton.partition import divide

    values = values_of(inputs)
    products = products_type(values)
    if products is None or not all(isinstance(layer, LSTMWeights) for layer in layers):
        return None
    batch = len(inputs.places if isinstance(inputs, UniqueRows) else inputs)
    limits = limits_of(values.device)
    fits = (divide(batch, layers[0].hidden.shape[1], products, limits, back=back) for back in (False, True))
    return products if all(partition is not None for partition in fits) else None


def _planned(call: LSTMArguments, keep: bool) -> tuple[LayerPlan, LayerTensors]:
    by_direction = zip(call.weights, call.recurrents, call.biases, strict=True)
    weights = [part.contiguous() for part in chain.from_iterable(by_direction)]
    state = (torch.stack(call.first_h), torch.stack(call.first_c)) if call.first_h else None
    tensors = LayerTensors(call.inputs, weights, state, call.lengths, call.places)
    settings = LayerSettings(call.inputs.dtype, call.products, call.stash, tuple(call.reverse))
    return plan_of(settings, tensors, keep), tensors


def _forward(call: LSTMArguments, keep: bool) -> LSTMResults:
    (plan, tensors), empty = _planned(call, keep), empty_results(call, False)
    results, _ = plan.forward(tensors, empty.outputs)
    gates = empty.gates
    if plan.keeps_sums:
        gates = results.gates.view(plan.directions, plan.steps, plan.batch, 4 * plan.hidden)
    return results._replace(cells=results.cells if plan.keeps_cells else empty.cells, gates=gates)


def _backward(call: LSTMArguments, results: LSTMResults, incoming: Incoming) -> Gradients:
    plan, tensors = _planned(call, True)
    needs = True, *[call.gate_gradient is None] * len(tensors.weights)
    dresults = [incoming[name] for name in ("outputs", "last_h", "last_c")]
    results = results._replace(gates=results.gates.flatten(0, 2))
    gradients = plan.backward(tensors, results, dresults, needs)
    return {
        "inputs": gradients.inputs,
        **{name: gradients.weights[at::3] for at, name in enumerate(("weights", "recurrents", "biases"))},
        "first_h": gradients.first_h,
        "first_c": gradients.first_c.unbind(0) if call.first_c else [],
        "gate_gradient": None if call.gate_gradient is None else gradients.sums.view_as(call.gate_gradient),
    }


_layer = layer_operator("persistent_lstm_layer", _forward, _backward)


def _run_layer(
    inputs: Inputs,
    layers: Sequence[AnyLSTMWeights],
    state: Sequence[tuple[Tensor, Tensor]],
    options: StackOptions,
    reverse: Sequence[bool],
    stash: str,
    products: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one layer; returns outputs (B, T, D H), and h and c (D, B, H) after each row's last step."""
    lengths = options.lengths
    if lengths is not None:
        lengths = lengths.to(values_of(inputs).device, non_blocking=True).contiguous()
    weights: list[Any] = [part for layer in layers for part in layer]
    parts = [part for pair in state for part in pair]
    settings = LayerSettings(values_of(inputs).dtype, products, stash, tuple(reverse))
    if isinstance(inputs, Tensor) and options.gate_gradient is None and is_plain([inputs, *weights, *parts]):
        first: Any = tuple(torch.stack(part) for part in zip(*state, strict=True)) if state else None
        keep = torch.is_grad_enabled() and any(part.requires_grad for part in (inputs, *weights, *parts))
        tensors = LayerTensors(inputs.transpose(0, 1), weights, first, lengths)
        return run_eagerly(plan_of(settings, tensors, keep), inputs, first, lengths, weights)
    options = options._replace(lengths=lengths)
    return run_layer(_layer, inputs, layers, state, options, reverse, stash, "persistent", products)


def lstm(
    inputs: Inputs,
    layers: tuple[AnyLSTMWeights, ...],
    state: LSTMState,
    options: StackOptions,
    *,
    stash: str = "gates",
) -> tuple[Tensor, LSTMState]:
    """Implements both ops as `recompute.lstm`."""
    products = products_of(inputs, layers)
    if products is None:
        return recompute.lstm(inputs, layers, state, options, stash=stash, backend="triton")
    if options.both_ways:
        outputs, h, c = _run_layer(inputs, layers, [], options, [False, True], stash, products)
        return outputs, ((h[0], c[0]), (h[1], c[1]))

    def run(number: int, read: Inputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        first = [] if options.from_zero else [state[number]]
        outputs, last_h, last_c = _run_layer(
            read, [layers[number]], first, options, [options.reverse], stash, products
        )
        return outputs, (last_h.squeeze(0), last_c.squeeze(0))  # squeeze: its backward launches no kernel

    outputs, last = run_stack(run, inputs, len(layers), options)
    return outputs, tuple(last)
