"""Model folders with matrices in 8 or 16 bits, made from others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from econmt.checkpoint.quantized import quantized
from econmt.errors import InputError
from econmt.export.model_folder import DerivedModel


def quantize_model(
    model: Path,
    output: Path,
    precision: Literal["int8", "bfloat16"] = "int8",
    checkpoint: str | int = "best",
    say: Callable[[str], object] = lambda _: None,
) -> tuple[int, int]:
    """Writes a new model folder with the matrices of a model in another precision.

    Args:
        model: Model folder. output: Folder to create.
        precision: Precision of the matrices.
        checkpoint: Parameters: best, last, or the number of an update.
        say: Called with the current activity.

    Returns:
        Bytes of the parameters before and after.

    Raises:
        InputError: The model cannot be read or has such matrices already, or the folder cannot be written.
    """
    derived = DerivedModel(model, output, "econmt quantize")
    say(f"reading {model}")
    path, tensors, metadata = derived.read(checkpoint)
    if metadata.get("quantized"):
        raise InputError(
            f"{path}: its matrices are {metadata['quantized']} already; quantize the model that it was made from"
        )
    made = quantized(tensors, getattr(torch, precision), path)
    say(f"writing {output}")
    derived.write(made, {**metadata, "quantized": precision})
    before, after = (sum(tensor.nbytes for tensor in state.values()) for state in (tensors, made))
    return before, after
