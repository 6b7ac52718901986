"""The operator of torch.library for a layer by persistent kernels, for calls that torch.compile or others look into.

Sizes: D directions, B batch, T steps, I input size, H hidden. Time is the first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.core.chunks import reaches
from econmt_ops.dispatch.registration import Gradients, Incoming, RecurrentOperator
from econmt_ops.lstm.direction import LSTMResults
from econmt_ops.lstm.persistent_layer import LayerPlan, plan_of
from econmt_ops.lstm.persistent_operands import LayerSettings, LayerTensors
from econmt_ops.products.repeated import Inputs, UniqueRows
from econmt_ops.products.stack import StackOptions


class PersistentArguments(NamedTuple):
    """Arguments of one layer that runs forwards, backwards, or in both directions into one output.

    Attributes:
        inputs: (T, B, I); with ``places`` distinct rows (N, I).
        weights: Input weights (4H, I), recurrent weights (4H, H) and bias (4H,) of each direction.
        first: h, then c, of each direction before its walk, (B, H) each; empty for zeros.
        lengths: (B,), or None. places: (T, B), row index of each position; or None.
        gate_gradient: (T, B, 4H), or None; see `econmt_ops.lstm`. It requires one direction and no ``places``.
        reverse, stash, products, together: See `LayerSettings`.
    """

    inputs: Tensor
    weights: list[Tensor]
    first: list[Tensor]
    lengths: Tensor | None
    places: Tensor | None
    gate_gradient: Tensor | None
    reverse: list[bool]
    stash: str
    products: torch.dtype
    together: str


def _empty(call: PersistentArguments, keep: bool) -> LSTMResults:
    """Allocates the results; tensors that are not kept have no steps."""
    directions, hidden, space = len(call.reverse), call.weights[1].shape[1], call.inputs.new_empty
    steps, batch = (call.inputs if call.places is None else call.places).shape[:2]
    cells, gates = (steps if keep and reaches(call.stash, level) else 0 for level in ("cells", "gates"))
    return LSTMResults(
        space(steps, batch, directions * hidden),
        space(directions, cells, batch, hidden, dtype=torch.float32),
        space(directions, gates, batch, 4 * hidden),
        space(directions, batch, hidden),
        space(directions, batch, hidden, dtype=torch.float32),
    )


def _planned(call: PersistentArguments, keep: bool) -> tuple[LayerPlan, LayerTensors]:
    weights, directions = [part.contiguous() for part in call.weights], len(call.reverse)
    state = None
    if call.first:
        state = torch.stack(call.first[:directions]), torch.stack(call.first[directions:])
    tensors = LayerTensors(call.inputs, weights, state, call.lengths, call.places)
    reverse = tuple(call.reverse)
    settings = LayerSettings(call.inputs.dtype, call.products, call.stash, reverse, call.together)
    return plan_of(settings, tensors, keep), tensors


def _forward(call: PersistentArguments, keep: bool) -> LSTMResults:
    (plan, tensors), empty = _planned(call, keep), _empty(call, False)
    results, _ = plan.forward(tensors, empty.outputs)
    gates = empty.gates
    if plan.keeps_sums:
        gates = results.gates.view(plan.directions, plan.steps, plan.batch, 4 * plan.hidden)
    return results._replace(cells=results.cells if plan.keeps_cells else empty.cells, gates=gates)


def _backward(call: PersistentArguments, results: LSTMResults, incoming: Incoming) -> Gradients:
    plan, tensors = _planned(call, True)
    needs = True, *[call.gate_gradient is None] * len(tensors.weights)
    dresults = [incoming[name] for name in ("outputs", "last_h", "last_c")]
    results = results._replace(gates=results.gates.flatten(0, 2))
    gradients = plan.backward(tensors, results, dresults, needs)
    return {
        "inputs": gradients.inputs,
        "weights": gradients.weights,
        "first": [*gradients.first_h, *gradients.first_c.unbind(0)] if call.first else [],
        "gate_gradient": None if call.gate_gradient is None else gradients.sums.view_as(call.gate_gradient),
    }


_layer = RecurrentOperator(
    "econmt_ops::persistent_lstm_layer",
    PersistentArguments,
    LSTMResults,
    forward=_forward,
    fake=_empty,
    backward=_backward,
    saves=lambda _: (*PersistentArguments._fields, "outputs", "cells", "gates"),
    constants=lambda call: () if call.gate_gradient is None else ("weights",),
)


def run_layer(
    inputs: Inputs,
    weights: list[Tensor],
    first: Sequence[tuple[Tensor, Tensor]],
    options: StackOptions,
    settings: LayerSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one layer; returns outputs (B, T, D H), and h and c (D, B, H) after each row's last step.

    ``weights`` are those of `PersistentArguments`, ``first`` (h, c) of each direction; empty for zeros.
    """
    results = _layer(
        PersistentArguments(
            inputs.rows if isinstance(inputs, UniqueRows) else inputs.transpose(0, 1),
            weights,
            [*(h for h, _ in first), *(c for _, c in first)],
            options.lengths,
            inputs.places.t() if isinstance(inputs, UniqueRows) else None,
            options.gate_gradient,
            list(settings.reverse),
            settings.stash,
            settings.products,
            settings.together,
        )
    )
    return results.outputs.transpose(0, 1), results.last_h, results.last_c
