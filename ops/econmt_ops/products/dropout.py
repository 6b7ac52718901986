"""Dropout from a seed, so that the backward pass can generate the mask again instead of keeping it.

A seed is an int, or an int64 scalar tensor on the device of the values, which a CUDA graph reads again at each replay.
On the CPU an int seeds PyTorch's generator. All other masks, from a seed in a tensor or on a GPU, are counter-based:
16 bits per element from Philox 4x32-10 (Salmon, Moraes, Dror and Shaw 2011), with the seed as its key and the number of
a group of eight elements, in row-major order, as its counter. Every implementation generates the same bits, and can
generate any part alone.

If several processes hold rows of one batch, each generates the masks that its rows have in the whole batch; `RowsSeed`
carries the number of the first row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar, Union

import torch
from torch import Tensor, nn

from econmt_ops.backends import triton
from econmt_ops.dispatch.registration import custom_op
from econmt_ops.dispatch.rule import MODE, is_transformed


class RowsSeed(NamedTuple):
    """Seed of the masks of some rows of a batch; the masks equal those rows of a mask of the whole batch.

    Attributes:
        seed: 64-bit int, or int64 scalar tensor on the device of the masks.
        first_row: Number within the batch of the first row of the values.
    """

    seed: int | Tensor
    first_row: int


Seed: TypeAlias = Union[int, Tensor, RowsSeed]
"""Seed of dropout masks: a 64-bit int, an int64 scalar tensor on the device of the masks, or either for some rows."""

_Seed = TypeVar("_Seed", int, Tensor)

_LEVELS = 1 << 16
"""Number of values of the 16 random bits drawn per element. On the CPU this is six times as fast as drawing from a
Bernoulli distribution, which took 7 % of a training step."""

_GOLDEN = 0x9E3779B97F4A7C15
"""Increment of splitmix64's state."""

_ROUNDS = 10
"""Number of rounds of Philox."""


def _signed(number: int) -> int:
    """Returns the int64 with the same 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _wrapped(number: _Seed) -> _Seed:
    """Returns a number modulo 2^64 as int64; tensors wrap by themselves."""
    return number if isinstance(number, Tensor) else _signed(number)


def _shifted(number: _Seed, bits: int) -> _Seed:
    """Shifts a signed 64-bit number right as if it were unsigned."""
    return (number >> bits) & ((1 << (64 - bits)) - 1)


def derive_seed(seed: _Seed, index: int) -> _Seed:
    """Returns the seed of the index-th mask of a call, of the same type as the given seed.

    It uses splitmix64 (Steele, Lea and Flood 2014), so that neighbouring seeds and indices give unrelated masks.
    """
    z = _wrapped(seed + _signed((index + 1) * _GOLDEN))
    z = _wrapped((z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9))
    z = _wrapped((z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB))
    return _shifted(z ^ _shifted(z, 31), 1)


def split_seed(seed: Seed | None) -> tuple[int, Tensor | None, int]:
    """Splits a seed into "int seed, Tensor? device_seed, int first_row" for torch.library; None becomes zeros."""
    number, first_row = seed if isinstance(seed, RowsSeed) else (seed, 0)
    return (0, number, first_row) if isinstance(number, Tensor) else (number or 0, None, first_row)


def join_seed(seed: int, device_seed: Tensor | None, first_row: int) -> RowsSeed:
    """Joins the parts of `split_seed`."""
    return RowsSeed(seed if device_seed is None else device_seed, first_row)


def seed_tensor(seed: int | Tensor, device: torch.device) -> Tensor:
    """Returns the seed as an int64 scalar tensor on a device, where a kernel can read it."""
    if isinstance(seed, Tensor):
        return seed.to(device)
    return torch.full((), _signed(seed), dtype=torch.int64, device=device)


class SeedCounter:
    """Seeds on a device for the random draws of a training step, which the step itself advances.

    A captured graph that begins with `advance` therefore uses new seeds at each replay, the same ones as an eager step.

    Args:
        seed: Seed of the training run.
        device: Device of the masks.
        draws: Largest number of draws of one step.

    Attributes:
        seeds: Seed of each draw, (draws,) int64.
    """

    def __init__(self, seed: int, device: torch.device, draws: int = 64) -> None:
        self._first = [derive_seed(seed, draw) for draw in range(draws)]
        self._drawn = 0
        self.seeds = torch.tensor(self._first, dtype=torch.int64, device=device)

    def advance(self) -> None:
        """Begins the next step, in one kernel: all seeds change, and `draw` starts again from the first."""
        # Plain _GOLDEN is what `derive_seed` adds for each layer: a mask would return one layer below in the next step.
        self.seeds.add_(_signed(_GOLDEN << 32))
        self._drawn = 0

    def draw(self) -> Tensor:
        """Returns the seed of the step's next draw, a scalar tensor that is valid until `advance`.

        Raises:
            ValueError: If the step draws more seeds than there are.
        """
        if self._drawn == len(self._first):
            raise ValueError(f"SeedCounter: a step draws more than {self._drawn} seeds; raise draws")
        self._drawn += 1
        return self.seeds[self._drawn - 1]


def keep_threshold(p: float) -> int:
    """Returns the number of 16-bit values, of 65,536, for which an element is kept; at least one."""
    return max(1, round((1.0 - p) * _LEVELS))


def _multiplied(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the upper and the lower 32 bits of the product of 32-bit words held in int64."""
    product = word * factor
    return _shifted(product, 32), product & 0xFFFFFFFF


def philox(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes Philox 4x32-10 of counters (N,) below 2^63, with the seed as key: four 32-bit words (N,), all int64."""
    keys = seed & 0xFFFFFFFF, _shifted(seed, 32)
    first, second = counter & 0xFFFFFFFF, _shifted(counter, 32)
    third = fourth = torch.zeros_like(counter)
    for turn in range(_ROUNDS):
        left, right = (
            (key + turn * step) & 0xFFFFFFFF for key, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)
        )
        high, low = _multiplied(0xD2511F53, first)
        other_high, other_low = _multiplied(0xCD9E8D57, third)
        first, second, third, fourth = other_high ^ second ^ left, other_low, high ^ fourth ^ right, low
    return first, second, third, fourth


def _counted_mask(elements: int, threshold: int, seed: Tensor, index: int, first: int) -> Tensor:
    """Computes the counter-based mask of a number of elements, starting at element ``first``, in PyTorch."""
    seed = seed if index < 0 else derive_seed(seed, index)
    before = first % 8
    groups = torch.arange(first // 8, -(-(first + elements) // 8), dtype=torch.int64, device=seed.device)
    halves = [half for word in philox(seed, groups) for half in (word & 0xFFFF, word >> 16)]
    return (torch.stack(halves, 1) < threshold).flatten()[before : before + elements]


def _is_counted(device: torch.device, device_seed: Tensor | None) -> bool:
    """Returns True if a mask is counter-based instead of drawn from PyTorch's CPU generator."""
    return device_seed is not None or (MODE.device or device.type) != "cpu"


def _kernels(device: torch.device) -> ModuleType | None:
    """Returns the module of GPU kernels for counter-based masks, or None if they do not support the device."""
    if not triton.runs_on(device):
        return None
    from econmt_ops.backends.triton import random  # imports triton

    return random


@custom_op("econmt_ops::keep_mask")
def _keep_mask(
    shape: Sequence[int],
    p: float,
    seed: int,
    index: int,
    device: torch.device,
    device_seed: Tensor | None = None,
    first_row: int = 0,
) -> Tensor:
    values, threshold = math.prod(shape), keep_threshold(p)
    first = first_row * math.prod(shape[1:])
    if not _is_counted(device, device_seed):
        generator = torch.Generator().manual_seed(seed if index < 0 else derive_seed(seed, index))
        # The generator cannot skip the draws of other rows.
        words = torch.empty(-(-(first + values) // 4), dtype=torch.int64, device="cpu")
        words.random_(-(1 << 63), None, generator=generator)
        # 2^15 does not fit int16, so the comparison is with the largest number that is kept.
        bits = words.view(torch.int16)[first : first + values]
        return (bits <= threshold - _LEVELS // 2 - 1).view(shape)
    key = seed_tensor(seed if device_seed is None else device_seed, device)
    kernels = _kernels(device)
    if kernels is None:
        return _counted_mask(values, threshold, key, index, first).view(shape)
    mask: Tensor = kernels.keep_mask(values, key, index, threshold, first)
    return mask.view(shape)


# Registered so that a compiled graph holds the seed as a plain number that may change from call to call.
_keep_mask.register_fake(
    lambda shape, p, seed, index, device, *_: torch.empty(shape, device=device, dtype=torch.bool)  # noqa: ARG005
)


def keep_mask(shape: Sequence[int], p: float, seed: Seed, device: torch.device, index: int = -1) -> Tensor:
    """Returns a bool tensor that is True, with probability 1 - p, where a value is kept.

    The same arguments give the same mask, except that an int seed gives different masks on the CPU and on a GPU. The
    mask does not depend on the type of the values.

    Args:
        shape: Shape of the mask.
        p: Probability that a value is dropped, in [0, 1); rounded to a multiple of 2^-16.
        seed: 64-bit int, int64 scalar tensor on the device, or `RowsSeed`.
        device: Device of the mask.
        index: If not negative, the mask is drawn from `derive_seed(seed, index)`.
    """
    if device.type == "meta":
        return torch.empty(tuple(shape), device=device, dtype=torch.bool)
    number, device_seed, first_row = split_seed(seed)
    mask: Tensor = _keep_mask(tuple(shape), p, number, index, device, device_seed, first_row)
    return mask


def dropout_mask(
    shape: Sequence[int], p: float, seed: Seed, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns the factors of dropout: 1 / (1 - p) where `keep_mask` is True, else 0.

    Args:
        shape: Shape of the mask.
        p: Probability that a value is dropped, in [0, 1).
        seed: See `keep_mask`.
        device: Device of the mask.
        dtype: Type of the mask.
    """
    return keep_mask(shape, p, seed, device).to(dtype).mul_(1.0 / (1.0 - p))


def apply_dropout(values: Tensor, keep: Tensor | None, p: float) -> Tensor:
    """Returns values / (1 - p) where `keep` is True and 0 elsewhere; `values` itself if `keep` is None."""
    return values if keep is None else torch.where(keep, values * (1.0 / (1.0 - p)), 0.0)


def _dropout_kernels(values: Tensor, device_seed: Tensor | None) -> ModuleType | None:
    """Returns the module of the GPU kernel of dropout, or None if it does not support these values."""
    counted = _is_counted(values.device, device_seed) and values.dtype != torch.float64
    return _kernels(values.device) if counted else None


@custom_op("econmt_ops::dropout")
def _dropout(
    values: Tensor,
    p: float,
    seed: int,
    index: int,
    variational: bool,
    device_seed: Tensor | None = None,
    first_row: int = 0,
) -> Tensor:
    kernels = _dropout_kernels(values, device_seed)
    if kernels is not None:
        key = seed_tensor(seed if device_seed is None else device_seed, values.device)
        scale = 1.0 / (1.0 - p)
        dropped: Tensor = kernels.dropout(
            values, key, index, keep_threshold(p), scale, variational, first_row
        )
        return dropped
    shape = (values.shape[0], 1, *values.shape[2:]) if variational else values.shape
    mask = keep_mask(shape, p, join_seed(seed, device_seed, first_row), values.device, index)
    return apply_dropout(values, mask, p)


@_dropout.register_fake
def _(values: Tensor, *settings: Any) -> Tensor:
    *_, device_seed, _first_row = settings
    kernels = _dropout_kernels(values, device_seed)
    if kernels is not None:
        like: Tensor = kernels.results_like(values)
        return like
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch names them
    # As a saved tensor the seed is version-checked: autograd reports a seed that advanced before the backward pass.
    *ctx.rest, device_seed, ctx.first_row = inputs[1:]
    ctx.save_for_backward(device_seed)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    dropped = _dropout(gradient, *ctx.rest, *ctx.saved_tensors, ctx.first_row)
    return dropped, None, None, None, None, None, None


_dropout.register_autograd(_backward, setup_context=_remember)


def dropout(values: Tensor, p: float, seed: Seed, variational: bool = False, index: int = -1) -> Tensor:
    """Applies dropout to values (B, T, ...) with a mask that is not kept, but made again in the backward pass.

    On a GPU each pass is one kernel. The values that are kept are scaled by 1 / (1 - p).

    Args:
        p, seed, index: See `keep_mask`.
        variational: If True, one mask (B, 1, ...) per row serves all its positions (Gal and Ghahramani 2016).
    """
    if p == 0.0:
        return values
    if is_transformed():
        shape = (values.shape[0], 1, *values.shape[2:]) if variational else values.shape
        return apply_dropout(values, keep_mask(shape, p, seed, values.device, index), p)
    number, device_seed, first_row = split_seed(seed)
    result: Tensor = _dropout(values, p, number, index, variational, device_seed, first_row)
    return result


def seed_of(
    module: nn.Module, p: float, seed: Seed | None, device: torch.device
) -> tuple[float, Seed | None]:
    """Returns the dropout probability that applies to a module now, and the seed of its masks.

    A seed of None is drawn from torch's generator: a number or, where torch.compile traces, a tensor on ``device``,
    because a number would break the graph.
    """
    if not module.training or p == 0.0:
        return 0.0, None
    if seed is None:
        if torch.compiler.is_compiling():
            return p, torch.randint(1 << 62, (), device=device)
        seed = int(torch.randint(1 << 62, (), device="cpu"))
    return p, seed
