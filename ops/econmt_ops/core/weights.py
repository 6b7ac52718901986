"""Weights and states that the recurrent ops take and return."""

from __future__ import annotations

from typing import NamedTuple, Union

import torch
from torch import Tensor


class LowRank(NamedTuple):
    """Matrix (N, K) of rank r, stored as two thin factors ``left right`` whose product is never computed.

    Sainath et al. 2013, "Low-rank matrix factorization for deep neural network training with high-dimensional output
    targets"; for recurrent weights Prabhavalkar et al. 2016, "On the compression of recurrent neural networks".
    """

    left: Tensor
    """Left factor, (N, r)."""
    right: Tensor
    """Right factor, (r, K)."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the product, (N, K)."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def rank(self) -> int:
        """Rank r: number of columns of ``left`` and rows of ``right``."""
        return self.right.shape[0]

    def to(self, dtype: torch.dtype) -> LowRank:
        """Returns the factors in another type."""
        return LowRank(self.left.to(dtype), self.right.to(dtype))

    def t(self) -> LowRank:
        """Returns the transpose, as views."""
        return LowRank(self.right.t(), self.left.t())

    def columns(self, begin: int, end: int) -> LowRank:
        """Returns the columns begin to end, as a view."""
        return LowRank(self.left, self.right[:, begin:end])


Matrix = Union[Tensor, LowRank]
"""Weight matrix (N, K), whole or factorized."""


class LSTMWeights(NamedTuple):
    """Weights of one LSTM layer; the 4H rows are the gates i, f, g, o in this order, as in `torch.nn.LSTM`."""

    input: Tensor
    """Input weight, (4H, I)."""
    hidden: Tensor
    """Recurrent weight, (4H, H)."""
    bias: Tensor
    """Bias, (4H,)."""


class LowRankLSTMWeights(NamedTuple):
    """Weights of one LSTM layer with factorized matrices; otherwise as :class:`LSTMWeights`."""

    input: LowRank
    """Input weight, (4H, I)."""
    hidden: LowRank
    """Recurrent weight, (4H, H)."""
    bias: Tensor
    """Bias, (4H,)."""


class ProjectedLSTMWeights(NamedTuple):
    """Weights of one LSTM layer with projection to P features; gates i, f, g, o, as in `torch.nn.LSTM`."""

    input: Tensor
    """Input weight, (4H, I)."""
    hidden: Tensor
    """Recurrent weight, (4H, P)."""
    bias: Tensor
    """Bias, (4H,)."""
    projection: Tensor
    """Projection of h, (P, H)."""


AnyLSTMWeights = Union[LSTMWeights, LowRankLSTMWeights]
"""Weights of one LSTM layer, with whole or factorized matrices."""


class AttentionalLSTMWeights(NamedTuple):
    """Weights of `attentional_lstm`: stacked LSTM layers with attention from the top layer."""

    layers: tuple[AnyLSTMWeights, ...]
    """Layers, bottom first; with input feeding the bottom layer's input weight is (4H, I + H)."""
    query: Tensor | None
    """Projection of the query, (A, H); None to use the top layer's h as the query, with A = H."""
    score: Tensor | None
    """Weight of the additive score, (A,); None for dot attention."""
    combine: Tensor
    """Weight of the output layer over h and context, (H, H + E)."""
    combine_bias: Tensor | None
    """Bias of the output layer, (H,), or None."""


def cast_weights(layer: AnyLSTMWeights, dtype: torch.dtype) -> AnyLSTMWeights:
    """Returns a layer in another type."""
    if isinstance(layer, LowRankLSTMWeights):
        return LowRankLSTMWeights(layer.input.to(dtype), layer.hidden.to(dtype), layer.bias.to(dtype))
    return LSTMWeights(*(part.to(dtype) for part in layer))


class GateWeights(NamedTuple):
    """Weights of one layer whose gates read the inputs alone: `sru`, `ssru`, `qrnn`, `min_gru`, `min_lstm`."""

    input: Tensor
    """Input weight, (K H, I) with K gates; (3H, 2I) for `qrnn` with a window of two steps."""
    bias: Tensor
    """Bias, (K H,)."""


class GILRLSTMWeights(NamedTuple):
    """Weights of one layer of `gilr_lstm`: the surrogate of h, and the gates in the order g, f, i, o."""

    surrogate: Tensor
    """Input weight of the surrogate, (2H, I)."""
    surrogate_bias: Tensor
    """Bias of the surrogate, (2H,)."""
    input: Tensor
    """Input weight of the gates, (4H, I)."""
    hidden: Tensor
    """Weight of the previous step's surrogate in the gates, (4H, H)."""
    bias: Tensor
    """Bias of the gates, (4H,)."""


class GRUWeights(NamedTuple):
    """Weights of one GRU layer; the 3H rows are r, z, n in this order, as in `torch.nn.GRU`."""

    input: Tensor
    """Input weight, (3H, I)."""
    hidden: Tensor
    """Recurrent weight, (3H, H)."""
    bias: Tensor
    """Bias of the input product, (3H,)."""
    hidden_bias: Tensor
    """Bias of the recurrent product, (3H,), added before r multiplies it."""


class LayerNormLSTMWeights(NamedTuple):
    """Weights of one LSTM layer whose two products are each normalized over all gates; gates i, f, g, o."""

    input: Tensor
    """Input weight, (4H, I)."""
    hidden: Tensor
    """Recurrent weight, (4H, H)."""
    bias: Tensor
    """Bias, (4H,), added after the normalization."""
    input_gain: Tensor
    """Gain of the normalized input product, (4H,)."""
    hidden_gain: Tensor
    """Gain of the normalized recurrent product, (4H,)."""
    cell_gain: Tensor
    """Gain of the normalized cell state, (H,)."""
    cell_bias: Tensor
    """Bias of the normalized cell state, (H,)."""


class LayerNormPerGateLSTMWeights(NamedTuple):
    """Weights of one LSTM layer whose summed products are normalized gate by gate; gates i, f, g, o."""

    input: Tensor
    """Input weight, (4H, I)."""
    hidden: Tensor
    """Recurrent weight, (4H, H)."""
    bias: Tensor
    """Bias, (4H,), added before the normalization."""
    gain: Tensor
    """Gain, (4H,)."""
    shift: Tensor
    """Bias, (4H,), added after the normalization."""
    cell_gain: Tensor
    """Gain of the normalized cell state, (H,)."""
    cell_bias: Tensor
    """Bias of the normalized cell state, (H,)."""


AnyLayerNormLSTMWeights = Union[LayerNormLSTMWeights, LayerNormPerGateLSTMWeights]
"""Weights of one layer of `lnlstm`; their class selects the normalization."""

LSTMState = tuple[tuple[Tensor, Tensor], ...]
"""(h, c) of every layer, bottom first, each (B, H)."""

State = tuple[tuple[Tensor, ...], ...]
"""States of every layer of a cell, bottom first; the cell defines how many a layer has."""


class AttentionalLSTMState(NamedTuple):
    """State that `attentional_lstm` carries from step to step."""

    layers: LSTMState
    """(h, c) of every layer, bottom first, each (B, H)."""
    output: Tensor
    """Output o of the step before, (B, H)."""


def tensors_of(tree: object) -> list[Tensor]:
    """Returns the tensors in nested tuples such as those above, without None and other values."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for part in tree for tensor in tensors_of(part)] if isinstance(tree, tuple) else []
