"""The LSTM on a GPU with persistent kernels: one launch runs all steps of a layer, with its weights kept on chip.

Such a launch runs a layer of a GRU, too. Layers that no persistent kernel supports (factorised, float64, IEEE float32,
more than 1,600 units, a device too small) run step by step as in `recompute`. Large products use matrices of `even`
width. Calls that torch.compile or others look into go through an operator of torch.library, others through
`eager_layer`.

Sizes: D directions, B batch, T steps, I input size, H hidden. Internally time is the first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from econmt_ops.backends.triton import interpreted, runs_on, with_kernels
from econmt_ops.core.precision import recurrent_tf32
from econmt_ops.core.weights import AnyLSTMWeights, GRUWeights, LSTMState, LSTMWeights
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

_LEAST_STEPS, _UNITS = 4, 256
"""Steps from which on `gru`, which copies the weights, takes less time than launches of single steps in a CUDA graph:
four, and the square of so many units. On an H200, both passes of 64 rows in bfloat16: 0.089 and 0.099 ms for 4 steps of
512 units, but 0.374 and 0.237 for 25; 0.550 and 0.485 for 25 steps of 1,024 units; 0.759 and 0.867 for 25 of 1,536.
"""


def products_type(dtype: torch.dtype) -> torch.dtype | None:
    """Returns the type of the products in a layer's recurrence, or None if no persistent kernel supports ``dtype``.

    float32 is supported where TF32 is allowed, with products in float16, which has TF32's precision in half the space;
    gradients are scaled into its range. Where TF32 is not allowed, float32 products have to be exact.
    """
    if dtype in (torch.bfloat16, torch.float16):
        return dtype
    if dtype != torch.float32:
        return None
    if interpreted():
        return torch.float32
    return torch.float16 if recurrent_tf32() else None


def _products(batch: int, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Returns `products_type`, or None if no launch fits the device."""
    from econmt_ops.backends.triton.partition import divide

    products, limits = products_type(dtype), limits_of(device)
    if products is None or any(
        divide(batch, hidden, products, limits, back=back) is None for back in (False, True)
    ):
        return None
    return products


def products_of(inputs: Inputs, layers: Sequence[AnyLSTMWeights]) -> torch.dtype | None:
    """Returns `products_type`, or None if no launch runs layers of an LSTM."""
    if not all(isinstance(layer, LSTMWeights) for layer in layers):
        return None
    values, batch = values_of(inputs), len(inputs.places if isinstance(inputs, UniqueRows) else inputs)
    return _products(batch, layers[0].hidden.shape[1], values.dtype, values.device)


def _planned(call: LSTMArguments, keep: bool) -> tuple[LayerPlan, LayerTensors]:
    by_direction = zip(call.weights, call.recurrents, call.biases, strict=True)
    weights = [part.contiguous() for part in chain.from_iterable(by_direction)]
    state = (torch.stack(call.first_h), torch.stack(call.first_c)) if call.first_h else None
    tensors = LayerTensors(call.inputs, weights, state, call.lengths, call.places)
    settings = LayerSettings(call.inputs.dtype, call.products, call.stash, tuple(call.reverse), gru=call.gru)
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
    gru: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one layer; returns outputs (B, T, D H), and h and c (D, B, H) after each row's last step."""
    lengths = options.lengths
    if lengths is not None:
        lengths = lengths.to(values_of(inputs).device, non_blocking=True).contiguous()
    weights: list[Any] = [part for layer in layers for part in layer]
    parts = [part for pair in state for part in pair]
    settings = LayerSettings(values_of(inputs).dtype, products, stash, tuple(reverse), gru=gru)
    if isinstance(inputs, Tensor) and options.gate_gradient is None and is_plain([inputs, *weights, *parts]):
        first: Any = tuple(torch.stack(part) for part in zip(*state, strict=True)) if state else None
        keep = torch.is_grad_enabled() and any(part.requires_grad for part in (inputs, *weights, *parts))
        tensors = LayerTensors(inputs.transpose(0, 1), weights, first, lengths)
        return run_eagerly(plan_of(settings, tensors, keep), inputs, first, lengths, weights)
    options = options._replace(lengths=lengths)
    return run_layer(_layer, inputs, layers, state, options, reverse, stash, "persistent", products, gru)


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


def gru_products(
    batch: int, steps: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> torch.dtype | None:
    """Returns `products_type`, or None if no launch runs a layer of a GRU, or takes longer than launches of steps."""
    enough = steps >= _LEAST_STEPS + (hidden / _UNITS) ** 2 and runs_on(device)
    return _products(batch, hidden, dtype, device) if enough else None


def gru(
    inputs: Tensor, weights: GRUWeights, h: Tensor, lengths: Tensor | None, products: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs one layer as `econmt_ops.layers.stepped.recompute` does, and keeps as much, in a launch of an LSTM.

    Its gates are r, z, the inputs' share of n and that of h, so a quarter of both matrices is zero.
    """
    size = h.shape[1]
    (both, n), (read, read_n), (recurrent, recurrent_n) = (
        torch.split(part, [2 * size, size]) for part in (weights.hidden, weights.bias, weights.hidden_bias)
    )
    zeros = both.new_zeros(size, size + inputs.shape[2])
    layer = LSTMWeights(
        torch.cat([weights.input, zeros[:, size:]]),
        torch.cat([both, zeros[:, :size], n]),
        torch.cat([read + recurrent, read_n, recurrent_n]),
    )
    outputs, last, _ = _run_layer(
        inputs, [layer], [(h, h)], StackOptions(lengths), [False], "outputs", products, gru=True
    )
    return outputs, (last.squeeze(0),)
