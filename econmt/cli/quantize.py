"""``econmt quantize``: converts the matrices of a trained model to 8 or 16 bits."""

from __future__ import annotations

from typing import Literal

import torch

from econmt.checkpoint.quantized import quantized
from econmt.cli.option_groups import option
from econmt.cli.options import CheckpointOption, ModelOption, NewModelOption
from econmt.data.files import notice
from econmt.data.progress_bars import status_line
from econmt.errors import InputError, printable
from econmt.export.model_folder import DerivedModel
from econmt.memory.report.tables import format_bytes


def quantize(
    model: ModelOption,
    output: NewModelOption,
    precision: Literal["int8", "bfloat16"] = option(
        "int8", help="int8: a quarter of the bytes; bfloat16: half of them."
    ),
    checkpoint: CheckpointOption = "best",
) -> None:
    """Convert the matrices of a trained model to 8 or 16 bits, and write them to a new model folder.

    In int8 each row of a matrix has its own scale. On a CPU translate multiplies such matrices in 8 bits and also
    rounds their inputs; on other devices and in other commands they are converted back when the model is loaded.

    \b
    Example:
      econmt quantize -m runs/multi30k -o multi30k-int8
      econmt translate -m multi30k-int8
    """
    derived = DerivedModel(model, output, "econmt quantize")
    with status_line() as say:
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
    notice(f"{format_bytes(before)} became {format_bytes(after)}, {after / before:.1%}")
    print(printable(output))
