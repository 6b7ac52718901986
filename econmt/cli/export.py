"""``econmt export``: a model without its training state, or without PyTorch."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from econmt import limits
from econmt.cli.options import refuse_idle
from econmt.data.progress_bars import status_line
from econmt.errors import printable
from econmt.training.export import export_model
from econmt.training.runtime_export import export_runtime


class ExportPrecision(str, Enum):
    """Of a runtime's matrices."""

    float32 = "float32"
    int8 = "int8"


def export(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Model folder.")],
    destination: Annotated[Path, typer.Argument(help="Folder to make.")],
    runtime: Annotated[
        bool, typer.Option("--runtime", help="A folder that translates without PyTorch: python FOLDER.")
    ] = False,
    precision: Annotated[
        ExportPrecision | None,
        typer.Option(help="Of a runtime's matrices.", show_default="int8 if the model's are, else float32"),
    ] = None,
    lexicon: Annotated[
        Path | None, typer.Option(help="File of econmt lexicon, with which a runtime restricts its words.")
    ] = None,
    lexicon_topk: Annotated[
        int | None,
        typer.Option(
            min=1, max=limits.SHORTLIST, help="Translations that it keeps of each word.", show_default="all"
        ),
    ] = None,
) -> None:
    """Write the best parameters, the recipe and the vocabulary, all that translating needs, to a new folder.

    \b
    Example:
      econmt export runs/multi30k multi30k-en-de
      econmt export --runtime runs/multi30k multi30k-runtime
      python multi30k-runtime < test.en
    """
    if not runtime:
        refuse_idle(
            context,
            "is for --runtime; give that too, or leave it out",
            "precision",
            "lexicon",
            "lexicon_topk",
        )
    if lexicon is None:
        refuse_idle(context, "is for --lexicon; give that too, or leave it out", "lexicon_topk")
    with status_line() as say:
        say(f"checking {folder} and copying it")
        if runtime:
            chosen = None if precision is None else precision.value
            made = export_runtime(folder, destination, chosen, lexicon, lexicon_topk)
        else:
            made = export_model(folder, destination)
    print(printable(made))
