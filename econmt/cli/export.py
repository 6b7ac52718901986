"""``econmt export``: a model without its training state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from econmt.cli.model_card import check_licence, model_card
from econmt.data.progress_bars import status_line
from econmt.errors import InputError, printable
from econmt.training.checkpoints import load_task
from econmt.training.export import check_new, export_model
from econmt.training.folder import ModelFolder


def export(
    folder: Annotated[Path, typer.Argument(help="Model folder.")],
    destination: Annotated[Path, typer.Argument(help="Folder to make.")],
    hub: Annotated[
        bool, typer.Option("--hub", help="Write a model card, too, as the Hugging Face Hub reads it.")
    ] = False,
    licence: Annotated[
        str | None,
        typer.Option("--license", help="Of the model, as the Hub names it, for --hub: apache-2.0, other."),
    ] = None,
) -> None:
    """Write the best parameters, the recipe and the vocabulary, all that translating needs, to a new folder.

    \b
    Example:
      econmt export runs/multi30k multi30k-en-de
      econmt export runs/multi30k multi30k-en-de --hub --license cc-by-nc-4.0
    """
    if hub != (licence is not None):
        raise InputError(
            "a model card names the licence of the model, which nobody else can know: give --license with --hub, or "
            "neither"
        )
    with status_line() as say:
        say(f"checking {folder} and copying it")
        check_new(destination)
        card = None
        if licence is not None:
            load_task(folder)
            card = model_card(ModelFolder(folder), check_licence(licence))
        made = export_model(folder, destination, card=card)
    print(printable(made))
