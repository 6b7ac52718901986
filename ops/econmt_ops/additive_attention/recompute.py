"""Additive attention by partial forward propagation: query and keys are saved, tanh(query + keys) is recomputed.

Both passes loop over the target steps with one workspace of at most B x S x A values; the B x T x S x A feature map
never exists.
Sizes: B batch, T target steps, S source positions, A attention size, E width of the values. Internally time is the
first axis, so that the rows of a step are contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.additive_attention.reference import AttentionArguments, pair_of
from econmt_ops.backends import steps_for
from econmt_ops.backends.attention import EagerAttention
from econmt_ops.backends.protocol import AttentionBackward, AttentionInputs
from econmt_ops.core.chunks import rows_of, split_blocks
from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.registration import Gradients, Incoming, Operator
from econmt_ops.dispatch.traits import Traits

TRAITS = Traits(recomputes=True)


class AttentionResults(NamedTuple):
    """Context (B, T, E) and weights (T, B, S)."""

    context: Tensor
    weights: Tensor


def cleaned(tensor: Tensor, lengths: Tensor | None) -> Tensor:
    """Returns a contiguous tensor (B, S, .) that is zero at padded positions.

    Called for keys before the operator, so that both passes share one copy and the original keys are not saved.
    """
    padding = padding_mask(lengths, tensor.shape[1], tensor.device)
    return zero_padding(tensor, padding).contiguous()


def _attention(arguments: AttentionArguments) -> tuple[EagerAttention, Tensor]:
    """Returns the attention kernels of a call, and its values (B, S, E) set to zero at padded positions."""
    lengths = arguments.lengths
    values = cleaned(arguments.values, lengths)
    steps, norm = steps_for(arguments.query, arguments.backend), pair_of(arguments.norm)
    inputs = AttentionInputs(arguments.keys, values, arguments.score_weight, norm, 1.0, lengths, False)
    return steps.attention(inputs), values


def _forward(arguments: AttentionArguments, keep: bool) -> AttentionResults:  # noqa: ARG001 - the weights are a result either way
    attention, values = _attention(arguments)
    weights = attention.weights_of(rows_of(arguments.query).transpose(0, 1))
    return AttentionResults(torch.bmm(weights.transpose(0, 1), values), weights)


def _empty(arguments: AttentionArguments, keep: bool) -> AttentionResults:  # noqa: ARG001
    (batch, steps, _), (_, positions, width) = arguments.query.shape, arguments.values.shape
    new = arguments.query.new_empty
    return AttentionResults(new(batch, steps, width), new(steps, batch, positions))


def _backward(arguments: AttentionArguments, results: AttentionResults, incoming: Incoming) -> Gradients:
    attention, values = _attention(arguments)
    (batch, steps, size), (_, positions, width) = arguments.query.shape, values.shape
    dcontext, dweights = incoming["context"], incoming["weights"]
    queries = rows_of(arguments.query).transpose(0, 1)
    dcontext = values.new_zeros(batch, steps, width) if dcontext is None else rows_of(dcontext)
    dcontexts = dcontext.transpose(0, 1)
    dweights = None if dweights is None else rows_of(dweights)
    dquery = torch.empty_like(arguments.query, memory_format=torch.contiguous_format)
    dscores = values.new_empty(steps, batch, positions, dtype=accumulate_dtype(values.dtype))
    for begin, end in split_blocks(steps, batch, -(-(size + width) // 4), dscores.dtype):
        block = slice(begin, end)
        contexts = torch.bmm(results.weights[block].transpose(0, 1), values).transpose(0, 1)
        part = values.new_empty(end - begin, batch, size)
        back = AttentionBackward(
            queries[block],
            contexts,
            results.weights[block],
            contexts,
            (dcontexts[block],),
            None if dweights is None else dweights[block],
            part,
            dscores[block],
        )
        attention.backward(back)
        dquery[:, block] = part.transpose(0, 1)
    sums = attention.gradients(queries, dscores)
    return {
        "query": dquery,
        "keys": sums.keys,
        "values": attention.projected_gradient(results.weights, dcontexts),
        "score_weight": sums.score,
        "norm": sums.norm or (),
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


def additive_attention(call: AttentionArguments, *, backend: str = "eager") -> tuple[Tensor, Tensor]:
    """Implements `econmt_ops.additive_attention`."""
    call = call._replace(keys=cleaned(call.keys, call.lengths), backend=backend)
    context, weights = _operator(call)
    return context, weights.transpose(0, 1)
