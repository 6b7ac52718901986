"""The weights and states that the recurrent ops take and return."""

from __future__ import annotations

from typing import NamedTuple, Union

import torch
from torch import Tensor


class LowRank(NamedTuple):
    """A matrix (N, K) of rank r as the product of two thin factors, ``left right``, which is never made.

    Sainath et al. 2013, "Low-rank matrix factorization for deep neural network training with high-dimensional output
    targets"; of recurrent weights: Prabhavalkar et al. 2016, "On the compression of recurrent neural networks".
    """

    left: Tensor
    """(N, r)"""
    right: Tensor
    """(r, K)"""

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes of the product, (N, K)."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def rank(self) -> int:
        """The columns of ``left`` and rows of ``right``."""
        return self.right.shape[0]

    def to(self, dtype: torch.dtype) -> LowRank:
        """The factors in another type."""
        return LowRank(self.left.to(dtype), self.right.to(dtype))

    def t(self) -> LowRank:
        """The transpose, as views."""
        return LowRank(self.right.t(), self.left.t())

    def columns(self, begin: int, end: int) -> LowRank:
        """The columns begin to end, as a view: those of ``right``."""
        return LowRank(self.left, self.right[:, begin:end])


Matrix = Union[Tensor, LowRank]
"""A weight matrix (N, K), whole or as factors."""


class LSTMWeights(NamedTuple):
    """One LSTM layer; the 4H rows are the gates i, f, g, o in this order, as in `torch.nn.LSTM`."""

    input: Tensor
    """(4H, I)"""
    hidden: Tensor
    """(4H, H)"""
    bias: Tensor
    """(4H,)"""


class LowRankLSTMWeights(NamedTuple):
    """One LSTM layer whose two matrices are products of factors; otherwise as :class:`LSTMWeights`."""

    input: LowRank
    """(4H, I)"""
    hidden: LowRank
    """(4H, H)"""
    bias: Tensor
    """(4H,)"""


AnyLSTMWeights = Union[LSTMWeights, LowRankLSTMWeights]
"""One LSTM layer, its matrices whole or as factors."""


class AttentionalLSTMWeights(NamedTuple):
    """A stack of LSTM layers with attention on top of it."""

    layers: tuple[AnyLSTMWeights, ...]
    """Bottom first; with input feeding the bottom layer's input weight is (4H, I + H)."""
    query: Tensor | None
    """(A, H), or None: the query is the top layer's h itself, and A is H."""
    score: Tensor | None
    """(A,) for additive attention, or None for dot attention."""
    combine: Tensor
    """(H, H + E)"""
    combine_bias: Tensor | None
    """(H,), or None."""


def cast_weights(layer: AnyLSTMWeights, dtype: torch.dtype) -> AnyLSTMWeights:
    """A layer in another type."""
    if isinstance(layer, LowRankLSTMWeights):
        return LowRankLSTMWeights(layer.input.to(dtype), layer.hidden.to(dtype), layer.bias.to(dtype))
    return LSTMWeights(*(part.to(dtype) for part in layer))


class GateWeights(NamedTuple):
    """One layer of a cell whose gates read the inputs alone: `sru`, `ssru`, `qrnn`, `min_gru`, `min_lstm`."""

    input: Tensor
    """(K H, I), K gates; of `qrnn` with a window of two steps (3H, 2I)."""
    bias: Tensor
    """(K H,)"""


class GILRLSTMWeights(NamedTuple):
    """One layer of `gilr_lstm`: the surrogate of h, and an LSTM's gates i, f, g, o in another order: g, f, i, o."""

    surrogate: Tensor
    """(2H, I)"""
    surrogate_bias: Tensor
    """(2H,)"""
    input: Tensor
    """(4H, I)"""
    hidden: Tensor
    """(4H, H), which reads the surrogate of the step before."""
    bias: Tensor
    """(4H,)"""


class GRUWeights(NamedTuple):
    """One GRU layer; the 3H rows are r, z, n in this order, as in `torch.nn.GRU`."""

    input: Tensor
    """(3H, I)"""
    hidden: Tensor
    """(3H, H)"""
    bias: Tensor
    """(3H,)"""
    hidden_bias: Tensor
    """(3H,), added to the recurrent product before r multiplies it."""


class LayerNormLSTMWeights(NamedTuple):
    """One LSTM layer with each product normalised over all gates; gates i, f, g, o."""

    input: Tensor
    """(4H, I)"""
    hidden: Tensor
    """(4H, H)"""
    bias: Tensor
    """(4H,)"""
    input_gain: Tensor
    """(4H,)"""
    hidden_gain: Tensor
    """(4H,)"""
    cell_gain: Tensor
    """(H,)"""
    cell_bias: Tensor
    """(H,)"""


class LayerNormPerGateLSTMWeights(NamedTuple):
    """One LSTM layer with the sum of the products normalised gate by gate; gates i, f, g, o."""

    input: Tensor
    """(4H, I)"""
    hidden: Tensor
    """(4H, H)"""
    bias: Tensor
    """(4H,), added before the normalisation."""
    gain: Tensor
    """(4H,)"""
    shift: Tensor
    """(4H,), added after it."""
    cell_gain: Tensor
    """(H,)"""
    cell_bias: Tensor
    """(H,)"""


AnyLayerNormLSTMWeights = Union[LayerNormLSTMWeights, LayerNormPerGateLSTMWeights]
"""One layer of `lnlstm`; which of them it is says how it normalises."""

LSTMState = tuple[tuple[Tensor, Tensor], ...]
"""(h, c) of every layer, bottom first, each (B, H)."""

State = tuple[tuple[Tensor, ...], ...]
"""The states of every layer of a cell, bottom first; what they are says the cell."""


class AttentionalLSTMState(NamedTuple):
    """What one step of `attentional_lstm` hands to the next."""

    layers: LSTMState
    """(h, c) of every layer, bottom first, each (B, H)."""
    output: Tensor
    """o, the attentional hidden of the step before: (B, H)."""


def tensors_of(tree: object) -> list[Tensor]:
    """The tensors in nested tuples such as those above, None and other things left out."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for part in tree for tensor in tensors_of(part)] if isinstance(tree, tuple) else []
