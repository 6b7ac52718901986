"""Additive attention in plain PyTorch: the definition that the other implementations are tested against."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.cells.attention import LAYER_NORM_EPSILON
from econmt_ops.core.lengths import padding_of, zero_padding
from econmt_ops.core.precision import accumulate_dtype


class AttentionArguments(NamedTuple):
    """Arguments of `econmt_ops.additive_attention`, checked and cast.

    Attributes:
        query: (B, T, A). keys: (B, S, A). values: (B, S, E). score_weight: (A,).
        norm: Gain and bias (A,) of the layer normalisation, or empty. lengths: (B,) int64, or None.
        backend: See `econmt_ops.backends.steps_for`.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    score_weight: Tensor
    norm: list[Tensor]
    lengths: Tensor | None
    backend: str = ""


def pair_of(norm: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Returns gain and bias of a layer normalisation; None if there is none."""
    return (norm[0], norm[1]) if norm else None


def additive_scores(
    query: Tensor, keys: Tensor, score_weight: Tensor, layer_norm: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Returns score_weight . tanh(query_t + keys_s), (B, T, S), of keys that are finite at padded positions."""
    hidden = query.unsqueeze(2) + keys.unsqueeze(1)
    if layer_norm is not None:
        hidden = functional.layer_norm(hidden, hidden.shape[-1:], *layer_norm, eps=LAYER_NORM_EPSILON)
    # In place: nothing else reads the input of tanh, and this tensor is the largest, B T S A values.
    return torch.matmul(hidden.tanh_(), score_weight)


def attend(scores: Tensor, values: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns context (B, T, E) and weights (B, T, S) of scores (B, T, S), in the type of the values (B, S, E).

    Values are finite at padded positions, where ``padding`` (B, S) is True; rows of length 0 give zeros.
    """
    scores = scores.to(accumulate_dtype(values.dtype))
    if padding is not None:
        # The lowest finite number rather than -inf avoids NaN in rows of length 0.
        scores = scores.masked_fill(padding.unsqueeze(1), torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, 2)
    if padding is not None:
        weights = weights.masked_fill(padding.unsqueeze(1), 0.0)
    weights = weights.to(values.dtype)
    return torch.bmm(weights, values), weights


def additive_attention(call: AttentionArguments) -> tuple[Tensor, Tensor]:
    """Implements `econmt_ops.additive_attention`."""
    keys, padding = call.keys, padding_of(call.keys, call.lengths)
    scores = additive_scores(call.query, zero_padding(keys, padding), call.score_weight, pair_of(call.norm))
    return attend(scores, zero_padding(call.values, padding), padding)
