"""Padding masks."""

from __future__ import annotations

import torch
from torch import Tensor


def padding_mask(lengths: Tensor, positions: int, device: torch.device, time_first: bool = False) -> Tensor:
    """Returns a bool tensor (B, positions), or (positions, B), that is True at and after a row's length.

    Args:
        lengths: (B,), on any device; nothing is copied back from the device.
        positions: Padded length.
        device: Device of the mask.
        time_first: True if the positions come first.
    """
    position, lengths = torch.arange(positions, device=device), lengths.to(device, non_blocking=True)
    if time_first:
        return position.unsqueeze(1) >= lengths
    return position >= lengths.unsqueeze(1)


def zero_padding(tensor: Tensor, padding: Tensor | None) -> Tensor:
    """Returns `tensor` (B, N, D) with zeros, also in place of NaN, where `padding` (B, N) is True."""
    return tensor if padding is None else tensor.masked_fill(padding.unsqueeze(-1), 0.0)
