"""Calls of the layer operator by persistent kernels.

Sizes: D directions, B batch, T steps, H hidden. Time is the first axis.
"""

from __future__ import annotations

import torch

from econmt_ops.dispatch.registration import Gradients, Incoming
from econmt_ops.lstm.direction import LSTMArguments, LSTMResults, empty_results
from econmt_ops.lstm.persistent_layer import LayerPlan, plan_of
from econmt_ops.lstm.persistent_operands import LayerSettings, LayerTensors


def _tensors(call: LSTMArguments) -> LayerTensors:
    layers = zip(call.weights, call.recurrents, call.biases, strict=True)
    weights = [part.contiguous() for layer in layers for part in layer]
    state = (torch.stack(call.first_h), torch.stack(call.first_c)) if call.first_h else None
    return LayerTensors(call.inputs, weights, state, call.lengths, call.places)


def _plan_of_call(call: LSTMArguments, tensors: LayerTensors, keep: bool) -> LayerPlan:
    products = getattr(torch, call.products)
    settings = LayerSettings(call.inputs.dtype, products, call.stash, tuple(call.reverse), call.together)
    return plan_of(settings, tensors, keep)


def run_forward(call: LSTMArguments, keep: bool) -> LSTMResults:
    """Runs a call of the layer operator."""
    tensors = _tensors(call)
    plan, empty = _plan_of_call(call, tensors, keep), empty_results(call, False)
    results, _ = plan.forward(tensors, empty.outputs)
    gates = empty.gates
    if plan.keeps_sums:
        gates = results.gates.view(plan.directions, plan.steps, plan.batch, 4 * plan.hidden)
    return results._replace(cells=results.cells if plan.keeps_cells else empty.cells, gates=gates)


def run_backward(call: LSTMArguments, results: LSTMResults, incoming: Incoming) -> Gradients:
    """Returns the gradients of a call of the layer operator by name."""
    tensors = _tensors(call)
    plan = _plan_of_call(call, tensors, True)
    needs = True, *[call.gate_gradient is None] * len(tensors.weights)
    dresults = [incoming[name] for name in ("outputs", "last_h", "last_c")]
    results = results._replace(gates=results.gates.flatten(0, 2))
    gradients = plan.backward(tensors, results, dresults, needs)
    return {
        "inputs": gradients.inputs,
        "weights": gradients.weights[::3],
        "recurrents": gradients.weights[1::3],
        "biases": gradients.weights[2::3],
        "first_h": gradients.first_h,
        "first_c": gradients.first_c.unbind(0) if call.first_c else [],
        "gate_gradient": None if call.gate_gradient is None else gradients.sums.view_as(call.gate_gradient),
    }
