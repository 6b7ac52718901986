"""Converts parameter files with 8-bit or 16-bit matrices from and to float32.

An 8-bit matrix (N, K) is stored under its name, and the scales (N,) float32 of its rows under its name and ``.steps``.
A scale is the largest absolute value of the row divided by 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from econmt.errors import InputError
from econmt_ops.core.int8 import rounded

STEPS = ".steps"


def quantized(tensors: Mapping[str, Tensor], precision: torch.dtype, where: Path) -> dict[str, Tensor]:
    """Converts the finite matrices of a model to ``precision``, int8 or bfloat16; vectors are unchanged."""
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or tensor.dtype != torch.float32:
            converted[name] = tensor
        elif not tensor.isfinite().all():
            raise InputError(
                f"{where}: '{name}' holds values that are not finite; quantize another checkpoint"
            )
        elif precision == torch.int8:
            converted[name], converted[name + STEPS] = rounded(tensor)
        else:
            converted[name] = tensor.to(precision)
    return converted


def restored(tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Converts 8-bit matrices, which need a scale for each row, and 16-bit ones to float32; others are unchanged."""
    converted = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            steps = tensors.get(name + STEPS)
            if steps is None or steps.dtype != torch.float32 or steps.shape != tensor.shape[:1]:
                raise InputError(f"{where}: '{name}' has no scales for its rows; create the folder again")
            converted[name] = tensor.to(torch.float32) * steps[:, None]
        elif tensor.dtype == torch.bfloat16:
            converted[name] = tensor.to(torch.float32)
        else:
            matrix = tensors.get(name.removesuffix(STEPS), tensor)
            if matrix.dtype != torch.int8:  # else the tensor is the matrix's scales
                converted[name] = tensor
    return converted
