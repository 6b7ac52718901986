"""Stochastic rounding of float32 values to bfloat16, after which a mean of many roundings is the value itself.

A parameter in bfloat16 has 8 bits of mantissa, so that rounding to nearest would lose every update below a 256th of it.
Rounded up with the probability of the part that is cut off, updates are kept on average (Gupta, Agrawal, Gopalakrishnan
and Narayanan 2015, "Deep learning with limited numerical precision").

The random bits are a hash of a seed, the number of a parameter, the number of its update and a value's position, so
that a resumed run rounds as one that never stopped, and every device in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
"""Factors of the hash "lowbias32" by Wellons (2018), a bijection of 32 bits."""

_EXPONENT = 0x7F800000
"""Bits of the exponent of a float32, all of which are set in infinities and NaN."""


def salt_of(seed: int, number: int) -> int:
    """Returns the 32 bits that tell parameters and seeds apart, as a signed integer."""
    bits = _hashed(_hashed(seed & 0xFFFFFFFF) ^ _hashed(seed >> 32 & 0xFFFFFFFF) ^ number)
    return bits - (1 << 32) if bits >> 31 else bits


def _hashed(bits: int) -> int:
    """Returns the hash of 32 bits."""
    bits = (bits ^ bits >> 16) * _FIRST & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) * _SECOND & 0xFFFFFFFF
    return bits ^ bits >> 16


def _hash_(bits: Tensor) -> Tensor:
    """Replaces int32 values by their hash, in place."""
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= _FIRST
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= _SECOND - (1 << 32)
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def round_into(rounded: Tensor, values: Tensor, step: Tensor, salt: int, begin: int = 0) -> None:
    """Rounds float32 values stochastically into a bfloat16 tensor of the same shape; infinities and NaN stay.

    Args:
        step: Number of the update, a scalar on the device.
        salt: Result of :func:`salt_of`.
        begin: Position of the first value within its parameter.
    """
    position = torch.arange(begin, begin + values.numel(), dtype=torch.int32, device=values.device)
    key = _hash_(_hash_(step.to(torch.int32, copy=True)) ^ salt)
    noise = _hash_(_hash_(position) ^ key).bitwise_and_(0xFFFF).view(values.shape)
    bits = values.contiguous().view(torch.int32)
    finite = (bits & _EXPONENT) != _EXPONENT
    cut = ((bits + noise) & -0x10000).view(torch.float32)
    rounded.copy_(torch.where(finite, cut, values))
