"""Additive attention by partial forward propagation: query and keys are stashed, tanh(query + keys) is made again.

Both passes walk over the target steps with one workspace of B S A values, or none; nothing of B T S A values exists.
B batch, T target steps, S source positions, A attention size, E width of the
values. Inside, time comes first, so that the rows of a step are contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.backends import steps_for
from econmt_ops.backends.protocol import AttentionKernels
from econmt_ops.core.chunks import rows_of, split_blocks
from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.registration import Gradients, Incoming, Operator
from econmt_ops.dispatch.traits import Traits

TRAITS = Traits(recomputes=True)


class AttentionArguments(NamedTuple):
    """The arguments of the operator."""

    query: Tensor
    """(B, T, A)"""
    keys: Tensor
    """(B, S, A), as `clean_keys` gives them."""
    values: Tensor
    """(B, S, E)"""
    score_weight: Tensor
    """(A,)"""
    gain: Tensor | None
    """(A,) of the layer normalisation, as ``shift``."""
    shift: Tensor | None
    lengths: Tensor | None
    """(B,) int64"""
    backend: str


class AttentionResults(NamedTuple):
    """What the operator returns."""

    context: Tensor
    """(B, T, E)"""
    weights: Tensor
    """(T, B, S)"""


def clean_keys(keys: Tensor, lengths: Tensor | None) -> Tensor:
    """The keys (B, S, A) as additive attention wants them: zero at padded positions, and contiguous.

    Called before the operators, so that both passes share one copy and nobody keeps the keys as they were.
    """
    padding = None if lengths is None else padding_mask(lengths, keys.shape[1], keys.device)
    return zero_padding(keys, padding).contiguous()


def _attention(given: AttentionArguments) -> tuple[AttentionKernels, Tensor]:
    """The attention of this call, and the values (B, S, E), zero at padded positions."""
    values, lengths = given.values, given.lengths
    padding = None if lengths is None else padding_mask(lengths, values.shape[1], values.device)
    values = zero_padding(values, padding).contiguous()
    norm = None if given.gain is None or given.shift is None else (given.gain, given.shift)
    steps = steps_for(given.query, given.backend)
    return steps.attention(given.keys, values, given.score_weight, norm, 1.0, lengths), values


def _forward(given: AttentionArguments, keep: bool) -> AttentionResults:  # noqa: ARG001 - the weights are a result either way
    attention, values = _attention(given)
    weights = attention.weights_of(rows_of(given.query).transpose(0, 1))
    return AttentionResults(torch.bmm(weights.transpose(0, 1), values), weights)


def _empty(given: AttentionArguments, keep: bool) -> AttentionResults:  # noqa: ARG001
    query, values = given.query, given.values
    batch, steps, _ = query.shape
    return AttentionResults(
        query.new_empty(batch, steps, values.shape[2]), query.new_empty(steps, batch, values.shape[1])
    )


def _backward(given: AttentionArguments, kept: AttentionResults, incoming: Incoming) -> Gradients:
    attention, values = _attention(given)
    (batch, steps, size), (_, positions, width) = given.query.shape, values.shape
    dcontext, dweights = incoming["context"], incoming["weights"]
    queries = rows_of(given.query).transpose(0, 1)
    if dcontext is None:
        dcontexts = values.new_zeros(steps, batch, width)
    else:
        dcontexts = rows_of(dcontext).transpose(0, 1)
    dweights = None if dweights is None else rows_of(dweights)
    dquery = torch.empty_like(given.query, memory_format=torch.contiguous_format)
    dscores = values.new_empty(steps, batch, positions, dtype=accumulate_dtype(values.dtype))
    for begin, end in split_blocks(steps, batch, -(-(size + width) // 4), dscores.dtype):
        block = slice(begin, end)
        contexts = torch.bmm(kept.weights[block].transpose(0, 1), values).transpose(0, 1)
        dboth = values.new_empty(end - begin, batch, size + width)
        # The kernels go on to o = tanh(share + context). Where o is zero, the gradient of the context is that of o.
        attention.backward(
            queries[block],
            contexts,
            kept.weights[block],
            torch.zeros_like(contexts),
            (dcontexts[block],),
            None if dweights is None else dweights[block],
            dboth,
            dscores[block],
        )
        dquery[:, block] = dboth[..., :size].transpose(0, 1)
    found = attention.gradients(queries, dscores)
    gain, shift = (None, None) if found.norm is None else found.norm
    return {
        "query": dquery,
        "keys": found.keys,
        "values": attention.projected_gradient(kept.weights, dcontexts),
        "score_weight": found.score,
        "gain": gain,
        "shift": shift,
    }


_operator = Operator(
    "econmt_ops::additive_attention",
    AttentionArguments,
    AttentionResults,
    forward=_forward,
    fake=_empty,
    backward=_backward,
    saves=lambda _: (*AttentionArguments._fields, "weights"),
)


def additive_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    score_weight: Tensor,
    *,
    lengths: Tensor | None,
    layer_norm: tuple[Tensor, Tensor] | None,
    backend: str = "eager",
) -> tuple[Tensor, Tensor]:
    """See `econmt_ops.additive_attention`; all arguments are given, checked and cast."""
    gain, shift = (None, None) if layer_norm is None else layer_norm
    keys = clean_keys(keys, lengths)
    context, weights = _operator(
        AttentionArguments(query, keys, values, score_weight, gain, shift, lengths, backend)
    )
    return context, weights.transpose(0, 1)
