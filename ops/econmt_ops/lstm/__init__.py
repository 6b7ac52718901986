"""Stack of LSTM layers, in one direction or in both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from econmt_ops.cells.lstm import LSTM
from econmt_ops.cells.protocol import Cell
from econmt_ops.core.precision import compute_dtype, explicit_casts
from econmt_ops.core.shapes import Shapes, check_dropout
from econmt_ops.core.stack_checks import as_layers, check_weights, prepare_state
from econmt_ops.core.weights import (
    AnyLSTMWeights,
    LowRankLSTMWeights,
    LSTMState,
    LSTMWeights,
    State,
    cast_weights,
)
from econmt_ops.dispatch.select import Candidate, Problem, run
from econmt_ops.dispatch.traits import implementations
from econmt_ops.lstm import recompute, reference, triton
from econmt_ops.lstm.call_plans import PLANS, add_plan, key_of, key_of_lstm, merged, run_planned
from econmt_ops.lstm.reference import is_light
from econmt_ops.products.dropout import Seed
from econmt_ops.products.repeated import Inputs, UniqueRows, check_inputs, expanded, values_of
from econmt_ops.products.stack import StackOptions

_IMPLEMENTATIONS = implementations("lstm", reference, recompute, triton)
implementations(
    "bidirectional_lstm", **{each.name: (each.function, each.traits) for each in _IMPLEMENTATIONS.values()}
)

KINDS = (LSTMWeights, LowRankLSTMWeights)
"""Classes of a layer's weights."""


def run_layers(
    check: Shapes,
    inputs: Inputs,
    layers: tuple[Any, ...],
    cell: Cell,
    state: Any,
    options: StackOptions,
    light: bool,
    stash: str,
    implementation: str,
    key: Any = None,
) -> tuple[Tensor, Any]:
    """Runs an op over a stack of layers, whose inputs and weights are checked; adds its plan under ``key``.

    ``light``: True if the reference is known to be faster.
    """
    check.lengths(options.lengths, "T")
    check_dropout(check.op, options.dropout, options.seed)
    like = values_of(inputs)
    dtype = compute_dtype(like)
    start = prepare_state(check, cell.states, state, len(layers), like, dtype)

    def call(
        candidate: Candidate, inputs: Inputs, layers: tuple[Any, ...], start: State
    ) -> tuple[Tensor, State]:
        add_plan(key, candidate, dtype, inputs, layers)
        if not candidate.traits.casts:
            inputs, layers = expanded(inputs), cast_weights(layers, dtype)
        with explicit_casts(like):
            result: tuple[Tensor, State] = candidate.function(
                inputs.to(dtype), layers, start, options, **candidate.options
            )
        return result

    details = [f"layers={len(layers)}", "full" if options.lengths is None else "lengths"]
    details += ["repeated"] * isinstance(inputs, UniqueRows) + ["probe"] * (options.gate_gradient is not None)
    problem = Problem(check.op, (inputs, layers, start), dtype, check.sizes, " ".join(details), light)
    return run(problem, call, implementation, stash=stash)


def _runs_by_torch(layers: tuple[AnyLSTMWeights, ...], sizes: dict[str, int], like: Tensor) -> bool:
    """True if the reference is known to be faster; never for factorised layers, which torch.lstm does not support."""
    if isinstance(layers[0], LowRankLSTMWeights):
        return False
    return is_light(sizes["B"], sizes["T"], sizes["H"], compute_dtype(like), like.device)


def lstm(
    inputs: Inputs,
    layers: tuple[AnyLSTMWeights, ...],
    *,
    state: LSTMState | None = None,
    lengths: Tensor | None = None,
    reverse: bool = False,
    residual: bool = False,
    dropout: float = 0.0,
    dropout_seed: Seed | None = None,
    variational: bool = False,
    gate_gradient: Tensor | None = None,
    stash: str = "auto",
    implementation: str = "auto",
) -> tuple[Tensor, LSTMState]:
    """Runs a stack of LSTM layers over a batch of sequences.

    From `W x_t + U h_{t-1} + b` a layer (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000)
    computes the gates `i, f, u = sigmoid(.)` and `g = tanh(.)`, then `c_t = f c_{t-1} + i g` and `h_t = u tanh(c_t)`.

    Args:
        inputs: (B, T, I); or `UniqueRows`, the distinct input rows and the row index of each position.
        layers: weights, bottom first: input (4H, I), in the upper layers (4H, H), hidden (4H, H), bias (4H,); gate
            order i, f, g, o. With `LowRankLSTMWeights` each matrix is a product of two factors, applied as two small
            products; all layers must be of the same kind.
        state: (h, c) of every layer, bottom first, each (B, H); zeros if None.
        lengths: (B,) int64, on the CPU or the device; positions at or past a row's length are ignored. None: all rows
            are T long.
        reverse: True to run each row from its own last position to its first.
        residual: True if each layer but the bottom one outputs h plus its input; its state remains h.
        dropout: probability with which values read by the upper layers are dropped, before the residual sum.
        dropout_seed: seed of the dropout masks, required if dropout is not 0: an int, or an int64 scalar tensor on the
            device.
        variational: True for one mask per row and layer for all steps (Gal and Ghahramani 2016) instead of one per
            step.
        gate_gradient: (T, B, 4H) zeros in the compute type, whose gradient becomes that of `W x_t + U h_{t-1} + b` for
            one layer. The weights then get no gradient: it is computed from this one, for several calls at once; see
            :mod:`econmt_ops.lstm.chunked`.
        stash: tensors that the recomputing implementations save for the backward pass, each level in addition to the
            previous ones: "least", "outputs" (as much, with a larger workspace, which is faster), "attention"
            (weights), "cells", "gates". "auto" is the default of the
            implementation, and "gates" if the implementation is "auto" too. The reference saves what autograd saves.
        implementation: "auto" or the name of an implementation.

    Returns:
        The outputs of the top layer, (B, T, H), zero at or past a row's length; and the state after the last step of
        every row, as `state`. Past a row's length the state is unchanged. c is float32, or float64 for float64 inputs.

    Raises:
        ValueError: shapes or types do not fit, the implementation or stash level is unknown, or dropout has no seed.
    """
    key = None
    options = StackOptions(
        lengths, reverse, residual, dropout, dropout_seed, variational, state is None, gate_gradient
    )
    if gate_gradient is None:
        key = key_of_lstm(inputs, layers, state, options, implementation, stash)
        plan = PLANS.get(key)
        if plan is not None:
            first = tuple([(h.unsqueeze(0), c.unsqueeze(0)) for h, c in state or ()])
            outputs, last = run_planned(plan, inputs, layers, first, options)
            if len(last) != len(layers):  # cuDNN's, of all layers together
                last = list(zip(*(torch.split(part, 1) for part in last[0]), strict=True))
            return outputs, tuple([(h.squeeze(0), c.squeeze(0)) for h, c in last])
    layers = as_layers("lstm", merged(layers), KINDS)
    check = Shapes("lstm")
    check_inputs(check, inputs)
    for number, layer in enumerate(layers):
        LSTM.check(check, f"layers[{number}]", layer, "H" if number else "I")
    like = values_of(inputs)
    if gate_gradient is not None:
        check("gate_gradient", gate_gradient, "T B 4H")
        if len(layers) > 1 or reverse or like is not inputs or isinstance(layers[0], LowRankLSTMWeights):
            wanted = "one layer of LSTMWeights, a tensor as inputs, and reverse=False"
            raise ValueError(f"{check.op}: gate_gradient requires {wanted}")
    # torch.lstm does not expose the gradient of its gates.
    light = gate_gradient is None and _runs_by_torch(layers, check.sizes, like)
    return run_layers(check, inputs, layers, LSTM, state, options, light, stash, implementation, key)


def bidirectional_lstm(
    inputs: Inputs,
    forward: AnyLSTMWeights,
    backward: AnyLSTMWeights,
    *,
    lengths: Tensor | None = None,
    stash: str = "auto",
    implementation: str = "auto",
) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Runs one LSTM layer over a batch of sequences in both directions, from zero states (Schuster and Paliwal 1997).

    Args:
        inputs: (B, T, I); or `UniqueRows`, the distinct input rows and the row index of each position.
        forward: weights of the direction from the first to the last position: input (4H, I), hidden (4H, H), bias
            (4H,); full matrices or factors, as in `lstm`.
        backward: weights of the direction from each row's own last position to the first.
        lengths, stash, implementation: as in `lstm`.

    Returns:
        outputs (B, T, 2H), forward then backward, zero at or past a row's length; and ((h, c) forward, (h, c)
        backward), each (B, H), after the last step of each direction. c is float32, or float64 for float64 inputs.

    Raises:
        ValueError: shapes or types do not fit, or the implementation or stash level is unknown.
    """
    key = key_of("bidirectional_lstm", inputs, (forward, backward), None, lengths, (implementation, stash))
    plan = PLANS.get(key)
    if plan is not None:
        outputs, ((h, c),) = run_planned(plan, inputs, [(*forward, *backward)], (), StackOptions(lengths))
        return outputs, ((h[0], c[0]), (h[1], c[1]))
    forward, backward = merged((forward, backward))
    check = Shapes("bidirectional_lstm")
    check_inputs(check, inputs)
    check_weights(check.op, {"forward": forward, "backward": backward}, KINDS)
    LSTM.check(check, "forward", forward)
    LSTM.check(check, "backward", backward)
    layers, options = (forward, backward), StackOptions(lengths, from_zero=True, both_ways=True)
    light = _runs_by_torch(layers, check.sizes, values_of(inputs))
    return run_layers(check, inputs, layers, LSTM, None, options, light, stash, implementation, key)
