"""The LSTM on a GPU with persistent kernels: one launch runs all steps of a layer, with its weights kept on chip.

Layers that no persistent kernel supports (factorised, float64, IEEE float32, more than 1,600 units, a device too small)
run step by step as in `recompute`. Large products use matrices of `even` width.

Sizes: D directions, B batch, T steps, I input size, H hidden. Internally time is the first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt_ops.backends.triton import MOST_UNITS, interpreted, serves, with_kernels
from econmt_ops.core.chunks import reaches
from econmt_ops.core.precision import recurrent_tf32
from econmt_ops.core.repeated import Inputs, UniqueRows, values_of
from econmt_ops.core.stack import StackOptions, run_stack
from econmt_ops.core.weights import AnyLSTMWeights, LSTMState, LSTMWeights
from econmt_ops.dispatch.registration import Gradients, Incoming, RecurrentOperator
from econmt_ops.lstm import recompute
from econmt_ops.lstm.eager_layer import is_plain, run_layer
from econmt_ops.lstm.persistent_layer import LayerPlan, LayerResults, LayerTensors, plan_of
from econmt_ops.lstm.persistent_operands import LayerSettings

TRAITS = with_kernels(
    recompute.TRAITS, model_stash="attention", serves=lambda sizes, _: sizes["H"] <= MOST_UNITS
)


class PersistentArguments(NamedTuple):
    """Arguments of the layer operator; lists have one entry per direction.

    Attributes:
        inputs: (T, B, I); with ``places`` the distinct rows (N, I).
        weights, recurrents, biases: (4H, I), (4H, H) and (4H,), of any type; products are in the type of the inputs.
        first_h, first_c: (B, H), or empty lists: the initial state is zero.
        lengths: (B,), or None. places: (T, B), row index of each position; or None.
        products: Type of the products in the recurrence: "bfloat16", "float16" or "float32".
        together: See `LayerSettings`.
        gate_gradient: (T, B, 4H), see `econmt_ops.lstm`; requires one direction and no ``places``.
    """

    inputs: Tensor
    weights: list[Tensor]
    recurrents: list[Tensor]
    biases: list[Tensor]
    first_h: list[Tensor]
    first_c: list[Tensor]
    lengths: Tensor | None
    places: Tensor | None
    reverse: list[bool]
    stash: str
    products: str
    together: str
    gate_gradient: Tensor | None = None


def _tensors(call: PersistentArguments) -> LayerTensors:
    weights = [
        part.contiguous()
        for layer in zip(call.weights, call.recurrents, call.biases, strict=True)
        for part in layer
    ]
    state = (torch.stack(call.first_h), torch.stack(call.first_c)) if call.first_h else None
    return LayerTensors(call.inputs, weights, state, call.lengths, call.places)


def _plan(call: PersistentArguments, tensors: LayerTensors, keep: bool) -> LayerPlan:
    products = getattr(torch, call.products)
    settings = LayerSettings(call.inputs.dtype, products, call.stash, tuple(call.reverse), call.together)
    return plan_of(settings, tensors, keep)


def _empty_results(call: PersistentArguments, keep: bool) -> LayerResults:
    steps, batch = (call.inputs if call.places is None else call.places).shape[:2]
    directions, hidden = len(call.recurrents), call.recurrents[0].shape[1]
    new, exact = call.inputs.new_empty, torch.float32
    cells = steps if keep and reaches(call.stash, "cells") else 0
    sums = directions * steps * batch if keep and reaches(call.stash, "gates") else 0
    return LayerResults(
        new(steps, batch, directions * hidden),
        new(directions, batch, hidden),
        new(directions, batch, hidden, dtype=exact),
        new(directions, cells, batch, hidden, dtype=exact),
        new(sums, 4 * hidden),
    )


def _forward(call: PersistentArguments, keep: bool) -> LayerResults:
    tensors = _tensors(call)
    plan, empty = _plan(call, tensors, keep), _empty_results(call, False)
    results, _ = plan.forward(tensors, empty.outputs)
    return LayerResults(
        *results[:3],
        results.cells if plan.keeps_cells else empty.cells,
        results.sums if plan.keeps_sums else empty.sums,
    )


def _backward(call: PersistentArguments, results: LayerResults, incoming: Incoming) -> Gradients:
    tensors = _tensors(call)
    plan = _plan(call, tensors, True)
    needs = True, *[call.gate_gradient is None] * len(tensors.weights)
    gradients = plan.backward(
        tensors, results, [incoming[name] for name in ("outputs", "last_h", "last_c")], needs
    )
    return {
        "inputs": gradients.inputs,
        "weights": gradients.weights[::3],
        "recurrents": gradients.weights[1::3],
        "biases": gradients.weights[2::3],
        "first_h": gradients.first_h,
        "first_c": gradients.first_c.unbind(0) if call.first_c else [],
        "gate_gradient": None if call.gate_gradient is None else gradients.sums.view_as(call.gate_gradient),
    }


_operator = RecurrentOperator(
    "econmt_ops::persistent_lstm_layer",
    PersistentArguments,
    LayerResults,
    forward=_forward,
    fake=_empty_results,
    backward=_backward,
    saves=lambda _: (*PersistentArguments._fields, "outputs", "cells", "sums"),
    constants=lambda call: () if call.gate_gradient is None else ("weights", "recurrents", "biases"),
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
    parts = [part for pair in state for part in pair]
    if isinstance(inputs, Tensor) and gate_gradient is None and is_plain([inputs, *weights, *parts]):
        settings = LayerSettings(inputs.dtype, products, stash, tuple(reverse), together)
        h, c = (torch.stack(part) for part in zip(*state, strict=True)) if state else (None, None)
        first = None if h is None or c is None else (h, c)
        keep = torch.is_grad_enabled() and any(part.requires_grad for part in (inputs, *weights, *parts))
        tensors = LayerTensors(inputs.transpose(0, 1), weights, first, lengths)
        return run_layer(plan_of(settings, tensors, keep), inputs, first, lengths, weights)
    result = _operator(
        PersistentArguments(
            values if isinstance(inputs, UniqueRows) else values.transpose(0, 1),
            weights[::3],
            weights[1::3],
            weights[2::3],
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
