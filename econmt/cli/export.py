"""``econmt export``: a model without its training state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from econmt.training.checkpoints import export_model


def export(
    model: Annotated[Path, typer.Option("--models", "-m", help="Model folder.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make.", show_default=False)],
) -> None:
    """Write what translation needs, best parameters, recipe and vocabulary, to a new folder.

    \b
    Example:
      econmt export -m runs/multi30k -o multi30k-model
    """
    print(export_model(model, output))
