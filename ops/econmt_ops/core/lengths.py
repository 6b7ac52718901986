"""Padding: which positions lie at or past a row's length, and how a row is walked backwards."""

from __future__ import annotations

import torch
from torch import Tensor


def padding_mask(lengths: Tensor, positions: int, device: torch.device) -> Tensor:
    """Returns a bool tensor (B, positions) that is True where a position lies at or past its row's length.

    Args:
        lengths: (B,), on any device; nothing is copied back from the device.
        positions: the padded length.
        device: where the mask is to be.
    """
    return torch.arange(positions, device=device) >= lengths.to(device, non_blocking=True).unsqueeze(1)


def zero_padding(tensor: Tensor, padding: Tensor | None) -> Tensor:
    """Returns `tensor` (B, N, D) with zeros, even for NaN, where `padding` (B, N) is True."""
    return tensor if padding is None else tensor.masked_fill(padding.unsqueeze(-1), 0.0)


def reverse_rows(tensor: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverses each row of `tensor` (B, T, D) within its own length; it is its own inverse."""
    if lengths is None:
        return tensor.flip(1)
    position = torch.arange(tensor.shape[1], device=tensor.device)
    last = lengths.to(tensor.device, non_blocking=True).unsqueeze(1) - 1
    index = torch.where(position <= last, last - position, position)
    return tensor.gather(1, index.unsqueeze(2).expand_as(tensor))
