"""Attentional LSTM by partial forward propagation: small tensors are stashed, large ones recomputed.

The forward pass saves o, h of every layer and, depending on the stash level, the attention weights, the cell states and
the gates. The backward pass recomputes the rest, one block of steps at a time, in one workspace. Both passes are
operators of torch.library, so that FakeTensor and torch.compile support them; the backward operator has no derivative
of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.additive_attention.recompute import additive_attention, cleaned
from econmt_ops.additive_attention.reference import AttentionArguments, attend
from econmt_ops.attentional_lstm.backward import Backward
from econmt_ops.attentional_lstm.forward import forward
from econmt_ops.attentional_lstm.problem import AttentionalArguments, AttentionalProblem, Result, empty_result
from econmt_ops.attentional_lstm.reference import DecoderOptions, combined_output
from econmt_ops.cells.lstm import LSTM
from econmt_ops.cells.table import cell_of
from econmt_ops.core.chunks import reaches
from econmt_ops.core.lengths import padding_of, zero_padding
from econmt_ops.core.precision import accumulate_dtype, matmul_tf32
from econmt_ops.core.scopes import layer
from econmt_ops.core.weights import (
    AttentionalLSTMState,
    AttentionalLSTMWeights,
    Coverage,
    State,
    cast_weights,
)
from econmt_ops.dispatch.registration import Operator
from econmt_ops.dispatch.traits import Traits
from econmt_ops.layers import stepped
from econmt_ops.lstm import triton as lstm_on_gpu
from econmt_ops.lstm.recompute import lstm
from econmt_ops.products.dropout import split_seed
from econmt_ops.products.low_rank import tensors_of_matrices
from econmt_ops.products.repeated import Inputs, UniqueRows, expanded, values_of
from econmt_ops.products.stack import run_cells

TRAITS = Traits(recomputes=True, loops=True, takes_stash=True, casts=True)


_operator = Operator(
    "econmt_ops::attentional_lstm",
    AttentionalArguments,
    Result,
    forward=lambda call, keep: forward(AttentionalProblem(call), keep),
    fake=empty_result,
    backward=lambda call, stash, incoming: Backward(AttentionalProblem(call), stash, incoming).run(),
    saves=lambda call: [
        *AttentionalArguments._fields,
        *("outputs", "h", "c", "gates", "coverage"),
        *(["attention"] if reaches(call.stash, "attention") else []),
    ],
)


def attentional_lstm(
    inputs: Inputs,
    keys: Tensor,
    values: Tensor,
    weights: AttentionalLSTMWeights,
    state: AttentionalLSTMState,
    options: DecoderOptions,
    *,
    stash: str = "attention",
    backend: str = "eager",
) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
    """Implements `econmt_ops.attentional_lstm` for checked arguments, cast except for matrices and biases."""
    if not options.input_feeding:
        cell = cell_of(weights.layers[0])
        if cell is LSTM:
            by_kernels = backend == "triton"
            run_stack: Any = lstm_on_gpu.lstm if by_kernels else functools.partial(lstm, backend=backend)
            stack = run_stack(inputs, weights.layers, state.layers, options.stack, stash=stash)
        else:
            run = functools.partial(stepped.recompute, cell, backend=backend)
            stack = run_cells(run, expanded(inputs), weights.layers, state.layers, options.stack)
        return _attend_at_once(stack, keys, values, weights, options, backend)
    if weights.score is not None:
        keys = keys.contiguous() if options.clean else cleaned(keys, options.lengths)
    result = _operator(_arguments(inputs, keys, values, weights, state, options, stash, backend))
    count = len(result.last_h)
    each = len(result.last_c) // count
    others = [result.last_c[number * each : (number + 1) * each].unbind(0) for number in range(count)]
    layers = tuple((h, *parts) for h, parts in zip(result.last_h.unbind(0), others, strict=True))
    outputs = result.outputs.transpose(0, 1)
    coverage = None if weights.coverage is None else result.last_coverage
    return outputs, result.attention.transpose(0, 1), AttentionalLSTMState(layers, outputs[:, -1], coverage)


def _arguments(
    inputs: Inputs,
    keys: Tensor,
    values: Tensor,
    weights: AttentionalLSTMWeights,
    state: AttentionalLSTMState,
    options: DecoderOptions,
    stash: str,
    backend: str,
) -> AttentionalArguments:
    """Returns the arguments of the operator."""
    cell = cell_of(weights.layers[0])
    parts = [cell.split(layer) for layer in weights.layers]
    combine, combine_bias, context_bias = weights.combine, weights.combine_bias, None
    if weights.gate is not None and combine_bias is not None:
        combine = torch.cat([weights.gate.weight, combine])
        combine_bias = torch.cat([weights.gate.bias, combine_bias])
        context_bias = weights.gate.context_bias
    nothing: Any = None
    covered = weights.coverage or Coverage("", nothing, nothing)
    return AttentionalArguments(
        values_of(inputs),
        keys,
        values,
        tensors_of_matrices([part.input for part in parts]),
        tensors_of_matrices([part.hidden for part in parts]),
        [part.read_bias for part in parts if part.read_bias is not None],
        [part.recurrent_bias for part in parts if part.recurrent_bias is not None],
        [tensor for part in parts for tensor in part.extra],
        weights.query,
        weights.score,
        combine,
        combine_bias,
        context_bias,
        list(options.layer_norm or ()),
        list(weights.output_norm or ()),
        *covered[1:],
        options.lengths,
        inputs.places if isinstance(inputs, UniqueRows) else None,
        [states[0] for states in state.layers],
        [other for states in state.layers for other in states[1:]],
        state.output,
        None if state.coverage is None else state.coverage.contiguous(),
        cell.name,
        covered.kind,
        options.stack.residual,
        options.stack.dropout,
        *split_seed(options.stack.seed),
        options.stack.variational,
        options.scale,
        options.clean,
        stash,
        backend,
        options.overwrites,
        matmul_tf32(),
    )


def _attend_at_once(
    stack: tuple[Tensor, State],
    keys: Tensor,
    values: Tensor,
    weights: AttentionalLSTMWeights,
    options: DecoderOptions,
    backend: str,
) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
    """Attends for all steps at once after the stack: without input feeding no attention is recurrent."""
    (h, layers), lengths, query = stack, options.lengths, stack[0]
    if weights.query is not None:
        # h is stored time-first, and the attention runs step by step.
        query = functional.linear(h.transpose(0, 1), weights.query.to(h.dtype)).transpose(0, 1)
    with layer("attention"):
        if weights.score is None:
            padding = padding_of(keys, lengths)
            scores = torch.bmm(query, zero_padding(keys, padding).transpose(1, 2))
            scores = scores.to(accumulate_dtype(h.dtype)) * options.scale
            context, attention = attend(scores, zero_padding(values, padding), padding)
        else:
            norm = list(options.layer_norm or ())
            call = AttentionArguments(query, keys, values, weights.score.to(h.dtype), norm, lengths)
            context, attention = additive_attention(call, backend=backend)
    outputs = combined_output(h, context, cast_weights(weights, h.dtype))
    return outputs, attention, AttentionalLSTMState(layers, outputs[:, -1])
