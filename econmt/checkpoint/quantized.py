"""Parameter files with matrices of 8 or 16 bits: how they are made, and how they become float32 again.

A matrix (N, K) of 8 bits stands under its name, and under its name and ``.steps`` the steps (N,) float32 of its rows: a
127th of each row's largest value.
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
    """Parameters with their matrices in ``precision``, int8 or bfloat16; vectors stay as they are.

    Raises:
        InputError: naming ``where``, if a matrix holds values that are not finite.
    """
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or tensor.dtype != torch.float32:
            made[name] = tensor
        elif not tensor.isfinite().all():
            raise InputError(
                f"{where}: '{name}' holds values that are not finite; quantize another checkpoint"
            )
        elif precision == torch.int8:
            made[name], made[name + STEPS] = rounded(tensor)
        else:
            made[name] = tensor.to(precision)
    return made


def restored(tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Parameters as a model has them: matrices of 8 and 16 bits become float32, others stay as they are.

    Raises:
        InputError: naming ``where``, if a matrix of 8 bits has no steps, or not one a row.
    """
    made = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            steps = tensors.get(name + STEPS)
            if steps is None or steps.dtype != torch.float32 or steps.shape != tensor.shape[:1]:
                raise InputError(f"{where}: '{name}' has no steps of its rows; make the folder again")
            made[name] = tensor.to(torch.float32) * steps[:, None]
        elif tensor.dtype == torch.bfloat16:
            made[name] = tensor.to(torch.float32)
        elif not (name.endswith(STEPS) and _is_of_8_bits(tensors.get(name.removesuffix(STEPS)))):
            made[name] = tensor
    return made


def _is_of_8_bits(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.int8
