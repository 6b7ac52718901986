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
    """Converts a weight (N, K) in float32, bfloat16 or int8 to the layout of the C library.

    Returns:
        The weight, padded with zeros and grouped by 16 outputs and by the n inputs that fill 4 bytes, (N / 16, K / n,
        16, n); and of an int8 weight the sum of each output's values, int32, of others no values.
    """
    inputs = 0 if values.dtype == torch.float32 else -values.shape[1] % (_FILLED // values.itemsize)
    filled = torch.nn.functional.pad(values, (0, inputs, 0, -len(values) % _LANES))
    count = _GROUP // values.itemsize
    words = filled.view(torch.int32).view(-1, _LANES, filled.shape[1] // count)
    grouped = words.transpose(1, 2).contiguous().view(values.dtype).view(len(words), -1, _LANES, count)
    summed = filled if values.dtype == torch.int8 else filled[:0]
    return grouped, summed.sum(1, dtype=torch.int32)
