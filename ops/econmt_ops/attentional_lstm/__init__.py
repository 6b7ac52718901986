"""Recurrent decoder with attention: a stack of layers that attends to a source, run over all target steps."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from econmt_ops.attentional_lstm import recompute, reference
from econmt_ops.attentional_lstm.reference import DecoderOptions
from econmt_ops.backends.triton import on_kernels
from econmt_ops.cells.lstm import LSTM
from econmt_ops.cells.table import cell_of
from econmt_ops.core.precision import accumulate_dtype, compute_dtype, explicit_casts
from econmt_ops.core.shapes import Shapes, check_dropout, kind_of
from econmt_ops.core.stack_checks import as_layers, prepare_state
from econmt_ops.core.weights import (
    COVERAGES,
    AttentionalLSTMState,
    AttentionalLSTMWeights,
    Coverage,
    DecoderLayer,
    cast_weights,
)
from econmt_ops.dispatch.select import Candidate, Problem, run
from econmt_ops.dispatch.traits import implementations
from econmt_ops.products.dropout import Seed
from econmt_ops.products.repeated import Inputs, UniqueRows, check_inputs, expanded, values_of
from econmt_ops.products.stack import StackOptions

implementations(
    "attentional_lstm",
    reference,
    recompute,
    triton=on_kernels(recompute.attentional_lstm, recompute.TRAITS, model_stash="attention"),
)

_KINDS = get_args(DecoderLayer)
"""Classes of a layer's weights."""


def _check_layers(check: Shapes, layers: tuple[DecoderLayer, ...], feeds: bool) -> None:
    """Checks the weights of the stack, and records H."""
    cell, bottom = cell_of(layers[0]), "I"
    hidden = cell.hidden_size(layers[0], check.sizes["I"])
    if feeds and hidden is not None:
        check.sizes["I+H"], bottom = check.sizes["I"] + hidden, "I+H"
    for number, layer in enumerate(layers):
        cell.check(check, f"weights.layers[{number}]", layer, "H" if number else bottom)


def _check_output(check: Shapes, weights: AttentionalLSTMWeights) -> None:
    """Checks what makes o of the stack's output and the context."""
    check.sizes["H+E"] = check.sizes["H"] + check.sizes["E"]
    check("weights.combine", weights.combine, "H H+E")
    if weights.combine_bias is not None:
        check("weights.combine_bias", weights.combine_bias, "H")
    check.norm(weights.output_norm, "weights.output_norm", "H")
    if weights.gate is not None:
        if weights.combine_bias is None:
            raise ValueError(f"{check.op}: weights.gate needs weights.combine_bias, got None")
        check("weights.gate.weight", weights.gate.weight, "H H+E")
        check("weights.gate.bias", weights.gate.bias, "H")
        check("weights.gate.context_bias", weights.gate.context_bias, "H")


def _check_coverage(check: Shapes, coverage: Coverage, weights: AttentionalLSTMWeights, feeds: bool) -> None:
    if coverage.kind not in COVERAGES:
        raise ValueError(
            f"{check.op}: weights.coverage.kind must be one of {', '.join(COVERAGES)}, got {coverage.kind!r}"
        )
    if weights.score is None or not feeds:
        lacking = "weights.score" if weights.score is None else "input_feeding"
        raise ValueError(f"{check.op}: weights.coverage needs {lacking}")
    check("weights.coverage.key", coverage.key, "A W")
    width = check.sizes["W"]
    check.sizes["P"] = {"sum": 1, "gru": 3 * width}.get(coverage.kind, width)
    check("weights.coverage.shares", coverage.shares, "B S P")
    for name, shape in (("attention", "P"), ("state", "P H"), ("recurrent", "P W")):
        part = getattr(coverage, name)
        if (part is None) != (coverage.kind == "sum"):
            wanted = "None" if coverage.kind == "sum" else "a tensor"
            raise ValueError(f"{check.op}: weights.coverage.{name} must be {wanted} for kind {coverage.kind}")
        if part is not None:
            check(f"weights.coverage.{name}", part, shape)


def _check(
    inputs: Inputs, keys: Tensor, values: Tensor, weights: AttentionalLSTMWeights, options: DecoderOptions
) -> Shapes:
    """Checks the arguments; returns the sizes, or raises ValueError."""
    layer_norm = options.layer_norm
    check = Shapes("attentional_lstm")
    check_inputs(check, inputs)
    _check_layers(check, weights.layers, options.input_feeding)
    if weights.query is None:
        check.sizes["A"] = check.sizes["H"]
    else:
        check("weights.query", weights.query, "A H")
    check("keys", keys, "B S A")
    check("values", values, "B S E")
    check.not_empty("keys", keys)
    _check_output(check, weights)
    if weights.score is not None:
        check("weights.score", weights.score, "A")
        if options.scale != 1.0:
            wanted = "scale applies to dot attention only; with weights.score it must be 1"
            raise ValueError(f"{check.op}: {wanted}, got {options.scale}")
    elif layer_norm is not None:
        raise ValueError(f"{check.op}: layer_norm requires additive attention, but weights.score is None")
    check.norm(layer_norm)
    if weights.coverage is not None:
        _check_coverage(check, weights.coverage, weights, options.input_feeding)
    check.lengths(options.lengths, "S")
    check_dropout("attentional_lstm", options.stack.dropout, options.stack.seed)
    return check


def _detail(inputs: Inputs, weights: AttentionalLSTMWeights, options: DecoderOptions) -> str:
    """Returns the properties of a call, beside its sizes, that change the amount of work."""
    kind = "dot" if weights.score is None else "additive" if options.layer_norm is None else "additive-norm"
    parts = [f"layers={len(weights.layers)}", kind, "fed" if options.input_feeding else "not-fed"]
    cell = cell_of(weights.layers[0])
    parts += [cell.name] * (cell is not LSTM)
    parts += [f"covered={weights.coverage.kind}"] if weights.coverage is not None else []
    parts += ["gated"] * (weights.gate is not None) + ["normed"] * (weights.output_norm is not None)
    return " ".join(parts + ["repeated"] * isinstance(inputs, UniqueRows))


def attentional_lstm(
    inputs: Inputs,
    keys: Tensor,
    values: Tensor,
    weights: AttentionalLSTMWeights,
    *,
    lengths: Tensor | None,
    state: AttentionalLSTMState | None = None,
    input_feeding: bool = True,
    residual: bool = False,
    dropout: float = 0.0,
    dropout_seed: Seed | None = None,
    variational: bool = False,
    layer_norm: tuple[Tensor, Tensor] | None = None,
    scale: float = 1.0,
    clean: bool = False,
    overwrites: bool = False,
    stash: str = "auto",
    implementation: str = "auto",
) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
    """Runs a recurrent decoder: a stack of layers, attention from the top layer and, optionally, input feeding.

    At step t the stack reads `[inputs_t ; o_{t-1}]`; h_t is the output of its top layer; attention with query
    `query h_t` over the keys gives the context; and `o_t = tanh(combine [h_t ; context_t] + combine_bias)`. The scores
    are `score . tanh(query h_t + keys_s)` or, if `weights.score` is None, `scale * (query h_t) . keys_s` (Luong, Pham
    and Manning 2015, section 3). The layers are LSTMs or, by the class of their weights, GRUs or layer-normalized
    LSTMs; `weights` may add layer normalisation and a context gate to o, and coverage to the scores.

    A call with T steps equals T calls of one step that pass on the state; with dropout, only if `variational`.

    Args:
        inputs: (B, T, I); or `UniqueRows`, the distinct input rows and the row index of each position.
        keys: (B, S, A), already projected, including the bias if there is one.
        values: (B, S, E).
        weights: see `AttentionalLSTMWeights`.
        lengths: (B,) int64, lengths of the keys, on the CPU or the device; positions at or past them are ignored. None:
            all rows are S long.
        state: state returned by an earlier call; zeros if None.
        input_feeding: True if the bottom layer reads o of the previous step beside its input.
        residual, dropout, dropout_seed, variational: as for `econmt_ops.lstm`. A CUDA graph reads a seed on the device
            again at each replay.
        layer_norm: (gain (A,), bias (A,)) of a layer normalisation applied to query + keys before tanh; None: no
            normalisation.
        scale: scale of dot attention; must be 1 for additive attention.
        clean: True if the caller guarantees that keys and values are finite past the lengths, which saves copies of
            both.
        overwrites: True if nothing else reads the gradient of the outputs, so that a recomputing backward pass may
            overwrite it, which saves memory of its size.
        stash: tensors that the recomputing implementations save for the backward pass, as for `econmt_ops.lstm`.
        implementation: "auto" or the name of an implementation.

    Returns:
        outputs o (B, T, H); the attention weights (B, T, S), zero for rows of length 0; and the state after the last
        step.

    Raises:
        ValueError: shapes or types do not fit, the implementation or stash level is unknown, or dropout has no seed.
    """
    if not isinstance(weights, AttentionalLSTMWeights):
        raise ValueError(f"attentional_lstm: weights must be AttentionalLSTMWeights, got {kind_of(weights)}")  # noqa: TRY004  as all of its errors
    if not isinstance(state, (AttentionalLSTMState, type(None))):
        raise ValueError(f"attentional_lstm: state must be AttentionalLSTMState, got {kind_of(state)}")  # noqa: TRY004  as all of its errors
    weights = weights._replace(layers=as_layers("attentional_lstm", weights.layers, _KINDS))
    like = values_of(inputs)
    dtype = compute_dtype(like)
    stack = StackOptions(None, False, residual, dropout, dropout_seed, variational)
    options = DecoderOptions(lengths, stack, input_feeding, layer_norm, scale, clean, overwrites)
    check = _check(inputs, keys, values, weights, options)
    first = None if state is None else state.layers
    names = cell_of(weights.layers[0]).states
    layers = prepare_state(check, names, first, len(weights.layers), like, dtype)
    output, coverage, exact = layers[0][0], None, accumulate_dtype(dtype)
    if weights.coverage is not None:
        shape = *keys.shape[:2], check.sizes["W"]
        coverage = keys.new_zeros(shape, dtype=exact)
    if state is not None:
        check("state.output", state.output, "B H")
        output = state.output.to(dtype)
        if state.coverage is not None and weights.coverage is not None:
            check("state.coverage", state.coverage, "B S W")
            coverage = state.coverage.to(exact)

    def call(
        candidate: Candidate,
        inputs: Inputs,
        keys: Tensor,
        values: Tensor,
        weights: AttentionalLSTMWeights,
        start: AttentionalLSTMState,
        norm: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
        casts = candidate.traits.casts
        norm = None if norm is None else (norm[0].to(dtype), norm[1].to(dtype))
        with explicit_casts(like):
            result: tuple[Tensor, Tensor, AttentionalLSTMState] = candidate.function(
                (inputs if casts else expanded(inputs)).to(dtype),
                keys.to(dtype),
                values.to(dtype),
                weights if casts else cast_weights(weights, dtype),
                start,
                options._replace(layer_norm=norm),
                **candidate.options,
            )
        return result

    arguments = (inputs, keys, values, weights, AttentionalLSTMState(layers, output, coverage), layer_norm)
    problem = Problem("attentional_lstm", arguments, dtype, check.sizes, _detail(inputs, weights, options))
    return run(problem, call, implementation, stash=stash)
