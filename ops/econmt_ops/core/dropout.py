"""Dropout made from a seed, so that the backward pass can make the same mask again instead of keeping it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops.dispatch.registration import custom_op

_MASK_64 = (1 << 64) - 1
_LEVELS = 1 << 16
"""Masks compare 16 random bits a value: on the CPU six times as fast as drawing from a Bernoulli distribution,
which took 7 % of a training step."""


def derive_seed(seed: int, index: int) -> int:
    """Returns the seed of the index-th mask of a call.

    By splitmix64 (Steele, Lea and Flood 2014), so that neighbouring seeds and indices give unrelated masks.
    """
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (z ^ (z >> 31)) >> 1


@custom_op("econmt_ops::keep_mask")
def _keep_mask(shape: Sequence[int], p: float, seed: int, index: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed if index < 0 else derive_seed(seed, index))
    values = math.prod(shape)
    words = torch.empty(-(-values // 4), device=device, dtype=torch.int64)
    words.random_(-(1 << 63), None, generator=generator)
    kept = max(1, round((1.0 - p) * _LEVELS))
    # 2^15 is no int16, so the comparison is with the largest number that is kept.
    return (words.view(torch.int16)[:values] <= kept - _LEVELS // 2 - 1).view(shape)


# Registered so that a compiled graph holds the seed as a plain number that may change from call to call.
@_keep_mask.register_fake
def _(shape: Sequence[int], _p: float, _seed: int, _index: int, device: torch.device) -> Tensor:
    return torch.empty(shape, device=device, dtype=torch.bool)


def keep_mask(shape: Sequence[int], p: float, seed: int, device: torch.device, index: int = -1) -> Tensor:
    """Returns a bool tensor that is True, with probability 1 - p, where a value is kept.

    The same arguments give the same mask, on the same kind of device; the values that dropout is applied to
    may have any type.

    Args:
        shape: of the mask.
        p: the probability that a value is dropped, in [0, 1); rounded to a multiple of 2^-16.
        seed: any 64-bit int.
        device: where the mask is made; the generators of different kinds of devices give different masks.
        index: if not negative, the mask is drawn from `derive_seed(seed, index)`.
    """
    if device.type == "meta":
        return torch.empty(tuple(shape), device=device, dtype=torch.bool)
    mask: Tensor = _keep_mask(tuple(shape), p, seed, index, device)
    return mask


def dropout_mask(
    shape: Sequence[int], p: float, seed: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns the mask to multiply with: 1 / (1 - p) where `keep_mask` keeps a value, else 0."""
    return keep_mask(shape, p, seed, device).to(dtype).mul_(1.0 / (1.0 - p))


def apply_dropout(values: Tensor, keep: Tensor | None, p: float) -> Tensor:
    """Returns values / (1 - p) where `keep` is True, 0 elsewhere; `values` itself if it is None."""
    return values if keep is None else torch.where(keep, values * (1.0 / (1.0 - p)), 0.0)


def layer_keep_masks(
    layers: int,
    batch: int,
    steps: int,
    hidden: int,
    p: float,
    seed: int | None,
    variational: bool,
    device: torch.device,
) -> list[Tensor | None]:
    """Returns the keep masks on what the layers of a stack read.

        None for the bottom one; for the others (B, T, H) or, if variational, (B, 1, H).
    Layer k (counted from 0) draws from `derive_seed(seed, k)`; masks are indexed by position, whichever way
        the stack walks.
    """
    if p == 0.0:
        return [None] * layers
    assert seed is not None
    shape = (batch, 1 if variational else steps, hidden)
    return [None] + [keep_mask(shape, p, seed, device, layer) for layer in range(1, layers)]


@custom_op("econmt_ops::dropout")
def _dropout(values: Tensor, p: float, seed: int, index: int, variational: bool) -> Tensor:
    shape = (values.shape[0], 1, *values.shape[2:]) if variational else values.shape
    return apply_dropout(values, keep_mask(shape, p, seed, values.device, index), p)


@_dropout.register_fake
def _(values: Tensor, _p: float, _seed: int, _index: int, _variational: bool) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch names them
    ctx.rest = inputs[1:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    return _dropout(gradient, *ctx.rest), None, None, None, None


_dropout.register_autograd(_backward, setup_context=_remember)


def dropout(values: Tensor, p: float, seed: int, variational: bool = False, index: int = -1) -> Tensor:
    """Drops values with a mask that nobody keeps: the backward pass makes it again from the seed.

    Args:
        values: (B, T, ...).
        p: the probability that a value is dropped, in [0, 1).
        seed: of the mask; the same seed gives the same mask, see `keep_mask`.
        variational: one mask a row for all its positions, (B, 1, ...) (Gal and Ghahramani 2016).
        index: as in `keep_mask`.
    """
    if p == 0.0:
        return values
    result: Tensor = _dropout(values, p, seed, index, variational)
    return result
