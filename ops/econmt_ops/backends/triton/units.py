"""Float32 values in float16, in units: powers of two by which they are multiplied to be float32 again.

Float16 has the mantissa of TF32. In units of its own a tensor has values up to 2^14, and the digits of those above
2^-28 of the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor


def units_of(largest: Tensor) -> Tensor:
    """Returns the units of float32 values up to ``largest``."""
    return torch.exp2(largest.clamp(1e-30, torch.finfo(torch.float32).max).log2().ceil() - 14.0)


def in_units(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 values (B, M, N) in float16, and the units of the B matrices (B,)."""
    largest = (
        torch.linalg.vector_norm(tensor, torch.inf, (1, 2))
        if tensor.numel()
        else tensor.new_zeros(len(tensor))
    )
    units = units_of(largest)
    return (tensor / units[:, None, None]).to(torch.float16, memory_format=torch.contiguous_format), units
