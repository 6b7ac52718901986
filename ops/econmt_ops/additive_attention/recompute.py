"""Additive attention by partial forward propagation: query and keys are stashed, tanh(query + keys) is made again.

Both passes walk over the target steps with one workspace of B S A values; nothing of B T S A values exists.
README.md gives the mathematics. B batch, T target steps, S source positions, A attention size, E width of the
values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from econmt_ops.additive_attention.scores import ScoreGradients, Scores, clean_keys
from econmt_ops.backends import steps as step_functions
from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.precision import explicit_casts
from econmt_ops.dispatch.registration import custom_op
from econmt_ops.dispatch.traits import Traits

TRAITS = Traits(recomputes=True)

_ARGUMENTS = (
    "Tensor query, Tensor keys, Tensor values, Tensor score_weight, Tensor? gain, Tensor? shift, Tensor? lengths, "
    "bool compiled"
)


def _prepare(
    keys: Tensor,
    score_weight: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    lengths: Tensor | None,
    compiled: bool,
) -> Scores:
    padding = None if lengths is None else padding_mask(lengths, keys.shape[1], keys.device)
    norm = None if gain is None or shift is None else (gain, shift)
    run = step_functions.steps(compiled)
    return Scores(keys, score_weight, norm, 1.0, padding, run)


@custom_op("econmt_ops::additive_attention", schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def _forward(
    query: Tensor, keys: Tensor, values: Tensor, score_weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    scores = _prepare(keys, score_weight, *rest)
    weights = query.new_empty(*query.shape[:2], keys.shape[1])
    for step in range(query.shape[1]):
        weights[:, step] = scores.weights(query[:, step])
    return torch.bmm(weights, zero_padding(values, scores.padding)), weights


@_forward.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, steps, _size = query.shape
    return query.new_empty(batch, steps, values.shape[2]), query.new_empty(batch, steps, keys.shape[1])


@custom_op(
    "econmt_ops::additive_attention_backward",
    schema=f"(Tensor? dcontext, Tensor? dweights, Tensor weights, {_ARGUMENTS}) -> Tensor[]",
)
def _backward(
    dcontext: Tensor | None,
    dweights: Tensor | None,
    weights: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    score_weight: Tensor,
    *rest: Any,
) -> list[Tensor]:
    scores = _prepare(keys, score_weight, *rest)
    values = zero_padding(values, scores.padding)
    sums = ScoreGradients(scores)
    dquery = torch.empty_like(query, memory_format=torch.contiguous_format)
    for step in range(query.shape[1]):
        total = weights.new_zeros(weights[:, step].shape, dtype=scores.accumulate)
        if dcontext is not None:
            total = total + torch.bmm(values, dcontext[:, step].unsqueeze(2)).squeeze(2)
        if dweights is not None:
            total = total + dweights[:, step]
        dquery[:, step] = sums.step(query[:, step], weights[:, step].to(scores.accumulate), total)
    if dcontext is None:
        dvalues = torch.zeros_like(values)
    else:
        dvalues = torch.bmm(weights.transpose(1, 2), dcontext)
    norm = (query.new_empty(0), query.new_empty(0)) if sums.norm is None else sums.norm
    results = [dquery, sums.key_gradient(), dvalues, sums.score, *norm]
    assert all(result is not None for result in results)
    return [result.to(query.dtype).contiguous() for result in results if result is not None]


@_backward.register_fake
def _(dcontext: Any, dweights: Any, weights: Tensor, *call: Any) -> list[Tensor]:  # noqa: ARG001
    nothing = weights.new_empty(0)
    return [
        nothing if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in call[:6]
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.compiled = inputs[-1]
    ctx.save_for_backward(output[1], *inputs[:-1])


def _differentiate(ctx: Any, dcontext: Tensor | None, dweights: Tensor | None) -> tuple[Any, ...]:
    with explicit_casts(ctx.saved_tensors[0]):
        gradients = _backward(dcontext, dweights, *ctx.saved_tensors, ctx.compiled)
    return (*(gradient if gradient.numel() else None for gradient in gradients), None, None)


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def additive_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    score_weight: Tensor,
    *,
    lengths: Tensor | None,
    layer_norm: tuple[Tensor, Tensor] | None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `econmt_ops.additive_attention`; all arguments are given, checked and cast."""
    gain, shift = (None, None) if layer_norm is None else layer_norm
    keys = clean_keys(keys, lengths)
    result: tuple[Tensor, Tensor] = _forward(
        query, keys, values, score_weight, gain, shift, lengths, compiled
    )
    return result
