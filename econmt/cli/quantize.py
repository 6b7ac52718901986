"""``econmt quantize``: a trained model with matrices of 8 or 16 bits."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import torch
import typer

from econmt.checkpoint.checkpoints import check_model, check_vocabulary, parameter_file
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.quantized import quantized
from econmt.checkpoint.tensor_files import read_tensors
from econmt.cli.inspection import read_recipe
from econmt.cli.options import ModelOption, NewModelOption
from econmt.config.recipe import Model
from econmt.data.files import notice
from econmt.data.progress_bars import status_line
from econmt.data.text.subwords import fingerprint
from econmt.errors import InputError, printable
from econmt.export.model_folder import check_new, write_model
from econmt.memory.report.tables import format_bytes


class MatrixPrecision(str, Enum):
    """Precision of the matrices in a parameter file."""

    int8 = "int8"
    bfloat16 = "bfloat16"


def quantize(
    model: ModelOption,
    output: NewModelOption,
    precision: Annotated[
        MatrixPrecision, typer.Option(help="int8: a quarter of the bytes; bfloat16: half of them.")
    ] = MatrixPrecision.int8,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", "-c", help="best, last, or the number of an update.")
    ] = "best",
) -> None:
    """Write a trained model's matrices in 8 or 16 bits to a new model folder, which translate reads as any other.

    Of int8 each row has its own scale. On a CPU translate multiplies such a model in 8 bits, and rounds what the
    matrices meet to 8 bits as it comes; elsewhere, and in every other verb, it is a model like others.

    \b
    Example:
      econmt quantize -m runs/multi30k -o multi30k-int8
      econmt translate -m multi30k-int8
    """
    folder = ModelFolder(model)
    recipe = read_recipe(folder)
    if not isinstance(recipe.model, Model):
        raise InputError(f"{model}: holds a language model; econmt quantize takes a translation model")
    check_new(output)
    path = parameter_file(folder, checkpoint)
    with status_line() as say:
        say(f"reading {path}")
        tensors, metadata = read_tensors(path)
        check_vocabulary(metadata, fingerprint(folder.path), path)
        check_model(metadata, recipe.model, path)
        if metadata.get("quantized"):
            raise InputError(
                f"{path}: its matrices are {metadata['quantized']} already; quantize the model that it was made from"
            )
        made = quantized(tensors, getattr(torch, precision.value), path)
        say(f"writing {output}")
        write_model(folder, output, made, {**metadata, "quantized": precision.value})
    before, after = (sum(each.nbytes for each in found.values()) for found in (tensors, made))
    notice(f"{format_bytes(before)} became {format_bytes(after)}, {after / before:.1%}")
    print(printable(output))
