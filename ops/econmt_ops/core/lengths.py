"""Padding masks."""

from __future__ import annotations

import torch
from torch import Tensor


def padding_mask(lengths: Tensor, positions: int, device: torch.device, time_first: bool = False) -> Tensor:
    """Returns a bool tensor (B, positions), or ``time_first`` (positions, B): True at and after a row's length.

    The lengths (B,) may be on any device; nothing is copied back from one.
    """
    position, lengths = torch.arange(positions, device=device), lengths.to(device, non_blocking=True)
    if time_first:
        return position.unsqueeze(1) >= lengths
    return position >= lengths.unsqueeze(1)


def padding_of(sequence: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Returns the padding (B, N) of a sequence (B, N, D) on its device; None, for no padding, without lengths."""
    return None if lengths is None else padding_mask(lengths, sequence.shape[1], sequence.device)


def zero_padding(tensor: Tensor, padding: Tensor | None) -> Tensor:
    """Returns `tensor` (B, N, D) with zeros, also in place of NaN, where `padding` (B, N) is True."""
    return tensor if padding is None else tensor.masked_fill(padding.unsqueeze(-1), 0.0)
