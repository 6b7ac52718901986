"""The weights and states that the recurrent ops take and return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LSTMWeights(NamedTuple):
    """One LSTM layer; the 4H rows are the gates i, f, g, o in this order, as in `torch.nn.LSTM`."""

    input: Tensor
    """(4H, I)"""
    hidden: Tensor
    """(4H, H)"""
    bias: Tensor
    """(4H,)"""


class AttentionalLSTMWeights(NamedTuple):
    """A stack of LSTM layers with attention on top of it."""

    layers: tuple[LSTMWeights, ...]
    """Bottom first; with input feeding the bottom layer's input weight is (4H, I + H)."""
    query: Tensor | None
    """(A, H), or None: the query is the top layer's h itself, and A is H."""
    score: Tensor | None
    """(A,) for additive attention, or None for dot attention."""
    combine: Tensor
    """(H, H + E)"""
    combine_bias: Tensor | None
    """(H,), or None."""


LSTMState = tuple[tuple[Tensor, Tensor], ...]
"""(h, c) of every layer, bottom first, each (B, H)."""


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
