"""``econmt quantize``: a trained model with matrices of 8 or 16 bits."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import typer

from econmt.checkpoint.quantized import quantized
from econmt.cli.option_groups import with_option_groups
from econmt.cli.options import CheckpointOption, ModelOption, NewModelOption
from econmt.data.files import notice
from econmt.data.progress_bars import status_line
from econmt.errors import InputError, printable
from econmt.export.model_folder import DerivedModel
from econmt.memory.report.tables import format_bytes


@with_option_groups
def quantize(
    model: ModelOption,
    output: NewModelOption,
    precision: Annotated[
        Literal["int8", "bfloat16"],
        typer.Option(help="int8: a quarter of the bytes; bfloat16: half of them."),
    ] = "int8",
    checkpoint: CheckpointOption = "best",
) -> None:
    """Write a trained model's matrices in 8 or 16 bits to a new model folder, which translate reads as any other.

    Of int8 each row has its own scale. On a CPU translate multiplies such a model in 8 bits, and rounds what the
    matrices meet to 8 bits as it comes; elsewhere, and in every other verb, it is a model like others.

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
    before, after = (sum(each.nbytes for each in found.values()) for found in (tensors, made))
    notice(f"{format_bytes(before)} became {format_bytes(after)}, {after / before:.1%}")
    print(printable(output))
