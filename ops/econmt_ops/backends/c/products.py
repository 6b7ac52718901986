"""Products of matrices by the C library: in bfloat16 on processors with instructions for it, in float32 on AMD's."""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends import c as library

_SQUARE = 32
"""Outputs, and inputs, to a multiple of which a weight is padded."""

_LEAST = 128
"""Fewest rows, inputs and outputs for which one float32 product is not slower than MKL's, by measurement on Zen 4."""


def serves(like: Tensor) -> bool:
    """Returns True if the library multiplies tensors of this device and type, and this one is not empty."""
    return like.numel() > 0 and library.serves(like) and library.multiplies(like.dtype)


def serves_once(left: Tensor, *sizes: int) -> bool:
    """Returns True if the library computes a product of ``left``, packing included, at least as fast as torch.

    Args:
        left: A factor, with the type of the products.
        sizes: Rows, inputs and outputs.
    """
    return serves(left) and (left.dtype == torch.bfloat16 or min(sizes) >= _LEAST)


def _padded(size: int) -> int:
    return -(-size // _SQUARE) * _SQUARE


def _strided(matrix: Tensor) -> Tensor:
    """Returns a matrix of which one stride is 1; a copy if neither is."""
    return matrix if 1 in matrix.stride() else matrix.contiguous()


class Tiles:
    """A weight (N, K) in the layout that products read.

    Args:
        weight: (N, K), float32 or bfloat16, with any strides.
        dtype: Type of the products, bfloat16 or float32: that of the tiles.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        weight = _strided(weight.detach().float() if dtype == torch.float32 else weight.detach())
        self.outputs, self.inputs = weight.shape
        self._tiles = weight.new_empty(_padded(self.outputs) * _padded(self.inputs), dtype=dtype)
        library.call(
            "pack_weight",
            weight.numel(),
            outputs=self.outputs,
            inputs=self.inputs,
            values=weight.data_ptr(),
            narrow=weight.dtype == torch.bfloat16,
            exact=dtype == torch.float32,
            output_stride=weight.stride(0),
            input_stride=weight.stride(1),
            tiles=self._tiles.data_ptr(),
        )

    def multiply(self, out: Tensor, left: Tensor, bias: Tensor | None = None, adds: bool = False) -> Tensor:
        """Writes left (M, K) weight^T + bias to ``out`` (M, N), or with ``adds`` adds it; returns ``out``.

        Both are float32 or bfloat16; ``out`` has a contiguous last axis, ``left`` any strides. The bias is float32.
        """
        exact = self._tiles.dtype == torch.float32
        left = _strided(left.float() if exact else left)
        assert out.dtype in (torch.float32, torch.bfloat16)
        library.call(
            "product_tiles", len(left) * self.outputs, rows=len(left), inputs=self.inputs, outputs=self.outputs,
            narrow=out.dtype == torch.bfloat16, adds=adds, exact=exact, left_narrow=left.dtype == torch.bfloat16,
            left=left.data_ptr(), left_row=left.stride(0), left_input=left.stride(1), weight=self._tiles.data_ptr(),
            bias=bias, output=out.data_ptr(), output_stride=out.stride(0),
        )  # fmt: skip
        return out
