"""Adam and AdamW with moments of one byte a value, scaled per block of a row.

The moments are stored as in Dettmers, Lewis, Shleifer and Zettlemoyer (2022, "8-bit optimizers via block-wise
quantization"), with two differences:

* A value, divided by the largest of its block, is a small float with three bits of mantissa. The second moment may be
  as small as 2^-32 of its block's largest value, and is never rounded to 0 beside a nonzero first moment, which would
  let an update explode.
* Rounding is dithered instead of to nearest: a second moment changes by a thousandth a step, a change that rounding to
  nearest would lose every time. The dither is the fractional part of the step times the golden ratio, so that no random
  numbers are needed and resumed runs are reproduced bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from econmt_ops.backends import triton
from econmt_ops.core.arguments import Update
from econmt_ops.optimizers import fused
from econmt_ops.optimizers.fused import FusedOptimizer, UpdateKernel
from econmt_ops.optimizers.loss_scale import unchanged_by_overflow

BLOCK = 256
"""Largest number of columns with a common scale."""

LEAST_VALUES = 4096
"""Values from which on a matrix has 8-bit moments; smaller matrices and all vectors keep float32, as in other
libraries."""

_MANTISSA = 3
_SHIFT = 23 - _MANTISSA
"""Bits of a float32 mantissa that are dropped."""

_FIRST, _FIRST_BITS, _SECOND_BITS = 2.0**-16, 111 << 23, 95 << 23
"""Smallest number of the small floats of 7 bits, its bits as a float32, and those of 2^-32, that of 8 bits."""

_LARGEST_CODED = 1.875 / 2.0
"""Largest value of both codes; a block's largest value is scaled a millionth below it so that it is never rounded up.
"""

_SMALLEST_SCALE = 1e-30
"""Lower bound of a scale, which avoids a division by zero in blocks of zeros."""

_GOLDEN = (5.0**0.5 - 1.0) / 2.0


class EightBitOptimizer(FusedOptimizer):
    """Adam or AdamW with 8-bit moments (names "adam8bit" and "adamw8bit"); otherwise as :class:`FusedOptimizer`.

    An update expands the moments of a few megabytes of values at a time to float32 (float64 for float64 parameters), or
    of none where Triton serves the GPU.

    The state of a matrix is ``exp_avg`` int8 and ``exp_avg_sq`` uint8, of the matrix's shape, and for each a ``_scale``
    (rows, blocks) float32.
    """

    names = ("adam8bit", "adamw8bit")

    def __init__(self, parameters: Iterable[nn.Parameter], *, name: str, **settings: Any) -> None:
        super().__init__(parameters, name=name, **settings)
        self._name = name.removesuffix("8bit")

    def moments(self, parameter: Tensor) -> dict[str, torch.Size]:
        """Returns the shapes as :meth:`FusedOptimizer.moments` does, with the scales of a matrix's blocks."""
        shapes = super().moments(parameter)
        if parameter.dim() < 2 or parameter.numel() < LEAST_VALUES:
            return shapes
        blocks = torch.Size([*parameter.shape[:-1], -(-parameter.shape[-1] // BLOCK)])
        return {
            key: shape for name in shapes for key, shape in ((name, shapes[name]), (f"{name}_scale", blocks))
        }

    def moment_type(self, parameter: Tensor, name: str) -> torch.dtype:
        """See :class:`FusedOptimizer`."""
        if len(self.moments(parameter)) == 2:
            return super().moment_type(parameter, name)
        return {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}.get(name, torch.float32)

    def _kernel_of(self, update: Update) -> UpdateKernel | None:
        if len(update.moments) == 2:
            return super()._kernel_of(update)
        values, gradient = update.values, update.gradient
        if not (
            triton.serves(values)
            and update.rows is None
            and not isinstance(gradient, FakeTensor)
            and values.dtype == gradient.dtype
            and values.dtype in (torch.float32, torch.bfloat16)
            and values.is_contiguous()
            and gradient.is_contiguous()
        ):
            return None
        from econmt_ops.backends.triton import adam_8bit  # imports triton

        return adam_8bit.run

    def _parts(self, update: Update, kernel: UpdateKernel | None) -> Iterator[Update] | None:
        parts = super()._parts(update, kernel)
        if parts is None and len(update.moments) == 4 and kernel is None:
            return self._decoded_parts(update)
        return parts

    def _decoded_parts(self, update: Update) -> Iterator[Update]:
        """Divides the update of a matrix with 8-bit moments, which are decoded and encoded again."""
        tensors = [part.flatten(0, -2) for part in (update.values, update.gradient, *update.moments)]
        rows = max(1, fused.BLOCK_BYTES // (tensors[0].shape[1] * tensors[0].element_size()))
        turn = update.numbers["step"].double() * _GOLDEN
        for values, gradient, *coded in zip(*(torch.split(part, rows) for part in tensors), strict=True):
            first, first_scale, second, second_scale = coded
            kind = values.dtype
            moments = read_first(first, first_scale).to(kind), read_second(second, second_scale).to(kind)
            yield update._replace(values=values, gradient=gradient.contiguous(), moments=moments)
            with unchanged_by_overflow(self._overflow, *coded):  # also by another rounding
                write_first(moments[0], first, first_scale, turn)
                write_second(moments[1], second, second_scale, turn + 0.5)


def read_first(codes: Tensor, scales: Tensor) -> Tensor:
    """Decodes signed codes (R, C) int8 with scales (R, blocks) to float32 values (R, C)."""
    bits = codes.to(torch.int32)
    sizes = bits.abs().bitwise_left_shift_(_SHIFT).add_(_FIRST_BITS).view(torch.float32).sub_(_FIRST)
    signed = sizes.view(torch.int32).bitwise_or_(bits.bitwise_and_(_SIGN)).view(torch.float32)
    return _multiply_by_scales(signed, scales)


def write_first(values: Tensor, codes: Tensor, scales: Tensor, turn: Tensor) -> None:
    """Encodes values (R, C), the inverse of :func:`read_first`; dithered by the fraction of ``turn``."""
    blocks = _split_into_blocks(values.to(torch.float32), scales.shape[1])
    # The offset makes the codes below the smallest normal one evenly spaced down to 0.
    sizes = _scale_blocks(blocks.abs(), scales, _LARGEST_CODED - _FIRST).add_(_FIRST)
    encoded = sizes.view(torch.int32).add_(_code_offset(turn, _FIRST_BITS)).bitwise_right_shift_(_SHIFT)
    negative = blocks.contiguous().view(torch.int32).bitwise_right_shift(31)  # -1, or 0
    codes.copy_(encoded.bitwise_xor_(negative).sub_(negative).flatten(1)[:, : codes.shape[1]])


def read_second(codes: Tensor, scales: Tensor) -> Tensor:
    """Decodes codes (R, C) uint8 with scales (R, blocks) to float32 (R, C), nonzero where the scale is."""
    bits = codes.to(torch.int32).bitwise_left_shift_(_SHIFT).add_(_SECOND_BITS)
    return _multiply_by_scales(bits.view(torch.float32), scales)


def write_second(values: Tensor, codes: Tensor, scales: Tensor, turn: Tensor) -> None:
    """Encodes nonnegative values (R, C), the inverse of :func:`read_second`; see :func:`write_first`."""
    sizes = _scale_blocks(
        _split_into_blocks(values.to(torch.float32), scales.shape[1]).clone(), scales, _LARGEST_CODED
    )
    encoded = (
        sizes.view(torch.int32)
        .add_(_code_offset(turn, _SECOND_BITS))
        .bitwise_right_shift_(_SHIFT)
        .clamp_(min=0)
    )
    codes.copy_(encoded.flatten(1)[:, : codes.shape[1]])


_SIGN = -(2**31)
"""Sign bit of a float32, as an int32."""


def _code_offset(turn: Tensor, least: int) -> Tensor:
    """Returns the offset from bits to codes, the least of which has the bits ``least``; dithered by ``turn``."""
    shares: Tensor = turn.frac() * 2**_SHIFT
    return shares.to(torch.int32) - least


def _split_into_blocks(values: Tensor, blocks: int) -> Tensor:
    """Reshapes (R, C) to (R, blocks, columns of a block); the last block is padded with zeros."""
    width = -(-values.shape[1] // blocks)
    if width * blocks > values.shape[1]:
        values = functional.pad(values, (0, width * blocks - values.shape[1]))
    return values.view(len(values), blocks, width)


def _scale_blocks(sizes: Tensor, scales: Tensor, most: float) -> Tensor:
    """Divides ``sizes`` (R, blocks, width) in place to be below ``most``; ``scales`` receives the divisors."""
    torch.amax(sizes, dim=2, out=scales)
    scales.mul_((1.0 + 1e-6) / most)
    return sizes.div_(scales.clamp(min=_SMALLEST_SCALE).unsqueeze(2))


def _multiply_by_scales(values: Tensor, scales: Tensor) -> Tensor:
    """Multiplies ``values`` (R, C) by the scales of their blocks."""
    columns = values.shape[1]
    blocks = _split_into_blocks(values, scales.shape[1]).mul_(scales.unsqueeze(2))
    return blocks.flatten(1)[:, :columns].contiguous()
