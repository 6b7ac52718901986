"""Weights and states that the recurrent ops take and return."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar, Union

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


class ContextGate(NamedTuple):
    """Gate between h and context in the output of `attentional_lstm` (Tu et al. 2017, section 3.2, "both").

    With combine = [Wh | Wc] the argument of tanh is `z (Wh h + combine_bias) + (1 - z) (Wc context + context_bias)`,
    where `z = sigmoid(weight [h ; context] + bias)`.
    """

    weight: Tensor
    """Weight of the gate over h and context, (H, H + E)."""
    bias: Tensor
    """Bias of the gate, (H,)."""
    context_bias: Tensor
    """Bias of the context's part, (H,)."""


COVERAGES = ("sum", "tanh", "sigmoid", "relu", "softrelu", "gru")
"""Kinds of coverage."""


class Coverage(NamedTuple):
    """Coverage C (B, S, W): the attention that each source position got so far (Tu et al. 2016).

    Additive scores read it: `score . tanh(query h_t + keys_s + key C_{t-1,s})`. With the attention weights a_t of a
    step, C_t is `C_{t-1} + shares a_t` for kind "sum", for an activation f `f(shares + attention a_t + state h_t +
    recurrent C_{t-1})`, and for "gru" a step of a GRU with state C, whose products are `shares + attention a_t + state
    h_t` and `recurrent C_{t-1}` with the rows r, z, n. P is 1 for "sum", W for an activation and 3W for "gru".
    """

    kind: str
    """One of `COVERAGES`."""
    key: Tensor
    """Weight of the coverage in the argument of tanh, (A, W)."""
    shares: Tensor
    """Numbers of each position, (B, S, P): with "sum" ones to count the attention, or inverse fertilities; otherwise a
    product with the values plus a bias."""
    attention: Tensor | None = None
    """Weight of the attention, (P,); None for "sum"."""
    state: Tensor | None = None
    """Weight of the stack's output, (P, H); None for "sum"."""
    recurrent: Tensor | None = None
    """Weight of the coverage before the step, (P, W); None for "sum"."""


DecoderLayer = Union[AnyLSTMWeights, GRUWeights, AnyLayerNormLSTMWeights]
"""Weights of one layer of `attentional_lstm`; their class selects the cell."""


class AttentionalLSTMWeights(NamedTuple):
    """Weights of `attentional_lstm`: stacked recurrent layers with attention from the top layer."""

    layers: tuple[DecoderLayer, ...]
    """Layers of one class, bottom first; with input feeding the bottom layer's input weight has I + H columns."""
    query: Tensor | None
    """Projection of the query, (A, H); None to use the top layer's h as the query, with A = H."""
    score: Tensor | None
    """Weight of the additive score, (A,); None for dot attention."""
    combine: Tensor
    """Weight of the output layer over h and context, (H, H + E)."""
    combine_bias: Tensor | None
    """Bias of the output layer, (H,), or None."""
    output_norm: tuple[Tensor, Tensor] | None = None
    """Gain (H,) and bias (H,) of a layer normalisation of the argument of the output's tanh, or None."""
    gate: ContextGate | None = None
    """Gate between h and context, which needs ``combine_bias``; or None."""
    coverage: Coverage | None = None
    """Coverage of the source positions, which needs ``score`` and input feeding; or None."""


LSTMState = tuple[tuple[Tensor, Tensor], ...]
"""(h, c) of every layer, bottom first, each (B, H)."""

State = tuple[tuple[Tensor, ...], ...]
"""States of every layer of a cell, bottom first; the cell defines how many a layer has."""


class AttentionalLSTMState(NamedTuple):
    """State that `attentional_lstm` carries from step to step."""

    layers: State
    """States of every layer, bottom first, each (B, H): (h, c), or (h,) of a GRU."""
    output: Tensor
    """Output o of the step before, (B, H)."""
    coverage: Tensor | None = None
    """Coverage (B, S, W) after the step before, in the accumulate type; None without coverage, or for zeros."""


def tensors_of(tree: object) -> list[Tensor]:
    """Returns the tensors in nested tuples such as those above, without None and other values."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for part in tree for tensor in tensors_of(part)] if isinstance(tree, tuple) else []


Weights = TypeVar("Weights", bound=tuple[Any, ...])


def cast_weights(weights: Weights, dtype: torch.dtype) -> Weights:
    """Returns weights such as those above, or a tuple of them, in another type."""

    def cast(part: Any) -> Any:  # torch's pytree takes three times as long
        if isinstance(part, tuple):
            made = map(cast, part)
            return tuple(made) if type(part) is tuple else type(part)(*made)
        return part.to(dtype) if isinstance(part, Tensor) else part

    made: Weights = cast(weights)
    return made
