"""``econmt export``: a model without its training state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from econmt.data.progress_bars import status_line
from econmt.errors import printable
from econmt.training.export import export_model


def export(
    folder: Annotated[Path, typer.Argument(help="Model folder.")],
    destination: Annotated[Path, typer.Argument(help="Folder to make.")],
) -> None:
    """Write the best parameters, the recipe and the vocabulary, all that translating needs, to a new folder.

    \b
    Example:
      econmt export runs/multi30k multi30k-en-de
    """
    with status_line() as say:
        say(f"checking {folder} and copying it")
        made = export_model(folder, destination)
    print(printable(made))
