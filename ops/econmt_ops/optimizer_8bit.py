"""Adam and AdamW whose moments take a byte a value, each block of a row with a scale of its own.

Between two steps a moment is kept as in Dettmers, Lewis, Shleifer and Zettlemoyer (2022, "8-bit optimizers via
block-wise quantization"), with two differences. A value over its block's largest is a small float, three bits of
mantissa at any size: the second moment may be 2^-32 of its block's largest, and never becomes 0 beside a first moment
that is none, which would let an update jump. And it is rounded up or down in turns, as often as it lies nearer to
either: a second moment changes by a thousandth in a step, which rounding to the nearest would leave out forever. The
turns are those of the golden ratio's multiples by the number of the step: nothing is drawn, and runs go on bit for bit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt_ops import optimizer
from econmt_ops.optimizer import FusedOptimizer, Update

BLOCK = 256
"""Columns with a common scale, at most."""

LEAST_VALUES = 4096
"""Matrices of fewer values, and vectors, keep float32 moments, as in other libraries."""

_MANTISSA = 3
_SHIFT = 23 - _MANTISSA
"""Bits of a float32's mantissa that are left out."""

_FIRST, _SECOND = 2.0**-16, 2.0**-32
"""The smallest of the numbers that 7 bits, and 8, can be with three bits of mantissa."""

_MOST = 1.875 / 2.0
"""The largest of both; the largest value of a block is kept a millionth below it, and so never rounded beyond."""

_LEAST = 1e-30
"""What a block of zeros is divided by."""

_GOLDEN = (5.0**0.5 - 1.0) / 2.0


class EightBitOptimizer(FusedOptimizer):
    """Adam or AdamW; see above, and :class:`FusedOptimizer` for everything else.

    An update has the moments in float32 for a few megabytes of values at a time. Gradients that are sparse, captured
    graphs, and values in float64, whose moments have no more bits for that, are as there.

    Its state of a matrix: ``exp_avg`` int8 and ``exp_avg_sq`` uint8, of the matrix's shape, and of both ``_scale``
    (rows, blocks) float32.
    """

    names = ("adam8bit", "adamw8bit")

    def __init__(self, parameters: Iterable[nn.Parameter], *, name: str, **settings: Any) -> None:
        super().__init__(parameters, name=name, **settings)
        self._name = name.removesuffix("8bit")

    def moments(self, parameter: Tensor) -> dict[str, torch.Size]:
        """See :class:`FusedOptimizer`; with the scales of a matrix's blocks."""
        whole = super().moments(parameter)
        if parameter.dim() < 2 or parameter.numel() < LEAST_VALUES:
            return whole
        blocks = torch.Size([*parameter.shape[:-1], -(-parameter.shape[-1] // BLOCK)])
        return {
            key: shape for name in whole for key, shape in ((name, whole[name]), (f"{name}_scale", blocks))
        }

    def moment_type(self, parameter: Tensor, name: str) -> torch.dtype:
        """See :class:`FusedOptimizer`."""
        if len(self.moments(parameter)) == 2:
            return parameter.dtype
        return {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}.get(name, torch.float32)

    def _run(self, updates: list[Update], divisor: Tensor | None) -> None:
        whole = [update for update in updates if len(update.moments) == 2]
        if whole:
            super()._run(whole, divisor)
        for update in updates:
            if len(update.moments) == 4:
                parts = [part.flatten(0, -2) for part in (update.values, update.gradient, *update.moments)]
                rows = max(1, optimizer.BLOCK_BYTES // (parts[0].shape[1] * parts[0].element_size()))
                for values, gradient, *moments in zip(
                    *(torch.split(part, rows) for part in parts), strict=True
                ):
                    self._run_rows(Update(values, gradient, tuple(moments), update.numbers), divisor)

    def _run_rows(self, update: Update, divisor: Tensor | None) -> None:
        first, first_scale, second, second_scale = update.moments
        kind = update.values.dtype
        moments = read_first(first, first_scale).to(kind), read_second(second, second_scale).to(kind)
        super()._run([update._replace(moments=moments)], divisor)
        turn = update.numbers["step"].double() * _GOLDEN
        write_first(moments[0], first, first_scale, turn)
        write_second(moments[1], second, second_scale, turn + 0.5)


def read_first(codes: Tensor, scales: Tensor) -> Tensor:
    """The values (R, C) float32 of signed codes (R, C) int8 with scales (R, blocks)."""
    bits = codes.to(torch.int32)
    sizes = bits.abs().bitwise_left_shift_(_SHIFT).add_(_bits(_FIRST)).view(torch.float32).sub_(_FIRST)
    signed = sizes.view(torch.int32).bitwise_or_(bits.bitwise_and_(_SIGN)).view(torch.float32)
    return _times(signed, scales)


def write_first(values: Tensor, codes: Tensor, scales: Tensor, turn: Tensor) -> None:
    """Writes values (R, C) as codes and scales, see :func:`read_first`; rounded by the fraction of ``turn``."""
    blocks = _in_blocks(values.to(torch.float32), scales.shape[1])
    # What is added makes even steps down to 0 of the smallest.
    sizes = _over_largest(blocks.abs(), scales, _MOST - _FIRST).add_(_FIRST)
    found = sizes.view(torch.int32).add_(_added(turn, _FIRST)).bitwise_right_shift_(_SHIFT)
    negative = blocks.contiguous().view(torch.int32).bitwise_right_shift(31)  # -1, or 0
    codes.copy_(found.bitwise_xor_(negative).sub_(negative).flatten(1)[:, : codes.shape[1]])


def read_second(codes: Tensor, scales: Tensor) -> Tensor:
    """The values (R, C) float32 of codes (R, C) uint8 with scales (R, blocks); none is 0 where its scale is not."""
    bits = codes.to(torch.int32).bitwise_left_shift_(_SHIFT).add_(_bits(_SECOND))
    return _times(bits.view(torch.float32), scales)


def write_second(values: Tensor, codes: Tensor, scales: Tensor, turn: Tensor) -> None:
    """Writes values (R, C), none of them below 0, as codes and scales; see :func:`write_first`."""
    sizes = _over_largest(_in_blocks(values.to(torch.float32), scales.shape[1]).clone(), scales, _MOST)
    found = sizes.view(torch.int32).add_(_added(turn, _SECOND)).bitwise_right_shift_(_SHIFT).clamp_(min=0)
    codes.copy_(found.flatten(1)[:, : codes.shape[1]])


_SIGN = -(2**31)
"""The bit of a float32's sign, which an int32 has at the same place."""


def _bits(value: float) -> int:
    """Those of a float32, as a whole number."""
    found: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return found


def _added(turn: Tensor, least: float) -> Tensor:
    """What makes codes of the bits of numbers over ``least``, rounded up as often as the fraction of ``turn`` says."""
    shares: Tensor = turn.frac() * 2**_SHIFT
    return shares.to(torch.int32) - _bits(least)


def _in_blocks(values: Tensor, blocks: int) -> Tensor:
    """(R, C) as (R, blocks, columns of a block), the last one filled up with zeros."""
    width = -(-values.shape[1] // blocks)
    if width * blocks > values.shape[1]:
        values = functional.pad(values, (0, width * blocks - values.shape[1]))
    return values.view(len(values), blocks, width)


def _over_largest(sizes: Tensor, scales: Tensor, most: float) -> Tensor:
    """``sizes`` (R, blocks, width), in place divided to be less than ``most``, by what goes to ``scales``."""
    torch.amax(sizes, dim=2, out=scales)
    scales.mul_((1.0 + 1e-6) / most)
    return sizes.div_(scales.clamp(min=_LEAST).unsqueeze(2))


def _times(values: Tensor, scales: Tensor) -> Tensor:
    """``values`` (R, C) times the scales of their blocks."""
    columns = values.shape[1]
    blocks = _in_blocks(values, scales.shape[1]).mul_(scales.unsqueeze(2))
    return blocks.flatten(1)[:, :columns].contiguous()
