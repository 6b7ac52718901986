"""``econmt quantize``: converts the matrices of a trained model to 8 or 16 bits."""

from __future__ import annotations

from typing import Literal

from econmt.data.files import notice
from econmt.data.progress_bars import status_line
from econmt.errors import printable
from econmt.export.model_folder import quantize_model
from econmt.options.option_groups import option
from econmt.options.shared_options import CheckpointOption, ModelOption, NewModelOption
from econmt_memory.report.tables import format_bytes


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
    with status_line() as say:
        before, after = quantize_model(model, output, precision, checkpoint, say)
    notice(f"{format_bytes(before)} became {format_bytes(after)}, {after / before:.1%}")
    print(printable(output))
