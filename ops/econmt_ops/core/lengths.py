"""Padding masks."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

Lengths = TypeVar("Lengths", bound=Tensor | None)


def padding_mask(lengths: Lengths, positions: int, device: torch.device, time_first: bool = False) -> Lengths:
    """Returns a bool tensor (B, positions), or ``time_first`` (positions, B): True at and after a row's length.

    The lengths (B,) may be on any device; nothing is copied back from one. Without lengths (None) there is no mask.
    """
    if lengths is None:
        return lengths
    position: Any = torch.arange(positions, device=device)
    ends = lengths.to(device, non_blocking=True)
    mask: Lengths = position.unsqueeze(1) >= ends if time_first else position >= ends.unsqueeze(1)
    return mask


def padding_of(sequence: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Returns the padding (B, N) of a sequence (B, N, D) on its device; None, for no padding, without lengths."""
    return padding_mask(lengths, sequence.shape[1], sequence.device)


def zero_padding(tensor: Tensor, padding: Tensor | None) -> Tensor:
    """Returns `tensor` (B, N, D) with zeros, also in place of NaN, where `padding` (B, N) is True."""
    return tensor if padding is None else tensor.masked_fill(padding.unsqueeze(-1), 0.0)
