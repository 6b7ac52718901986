"""Rounding to 8 bits with a scale for each row, and the layout in which the C library reads such weights.

The scale of a row is 1/127 of its largest absolute value. K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 127

_LANES, _GROUP, _FILLED = 16, 4, 64
"""Outputs per group in the C library's layout, bytes of their inputs, and the multiple of bytes to which inputs are
padded with zeros, unless they are float32."""


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight (N, K) to int8; also returns the scales (N,) float32 of its rows, 0 for a row of zeros."""
    values = weight.detach().to(torch.float32)
    largest = values.abs().amax(1)
    inverse = torch.where(largest > 0, _LARGEST / largest, 0.0)
    return torch.round(values * inverse[:, None]).to(torch.int8), largest / _LARGEST


def in_groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """Converts a rounded weight (N, K) to the layout of the C library.

    Returns:
        The weight (N / 16, K / 4, 16, 4), padded with zeros, and the sum of each output's weights, int32.
    """
    filled = padded(values)
    return grouped(filled), filled.sum(1, dtype=torch.int32)


def padded(values: Tensor) -> Tensor:
    """Pads a weight (N, K) in float32, bfloat16 or int8 with zeros, as the C library's layout needs it."""
    inputs = 0 if values.dtype == torch.float32 else -values.shape[1] % (_FILLED // values.itemsize)
    return torch.nn.functional.pad(values, (0, inputs, 0, -len(values) % _LANES))


def grouped(values: Tensor) -> Tensor:
    """Groups a padded matrix (N, K) by 16 outputs and by inputs that fill 4 bytes: (N / 16, K / n, 16, n)."""
    count = _GROUP // values.itemsize
    words = values.contiguous().view(torch.int32).view(-1, _LANES, values.shape[1] // count)
    return words.transpose(1, 2).contiguous().view(values.dtype).view(len(words), -1, _LANES, count)
