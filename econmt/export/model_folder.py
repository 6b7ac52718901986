"""Model folders made from others: what translation needs, and no training state."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from econmt.checkpoint.checkpoints import load_task
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.tensor_files import read_tensors, write_tensors, write_text
from econmt.data.files import whole_folder, writing
from econmt.data.text.subwords import vocabulary_files
from econmt.errors import InputError


def check_new(output: Path) -> None:
    """Raises InputError if a folder to be made is there already and not empty."""
    if Path(os.path.realpath(output)).is_symlink():
        raise InputError(f"{output}: a link that leads to itself; give a new folder")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: exists already; give a new folder")


def write_model(
    source: ModelFolder,
    output: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    recipe: str | None = None,
    card: str | None = None,
) -> None:
    """Writes a model folder under a temporary name and renames it, so that it is whole or not there.

    Args:
        source: whose vocabulary, and recipe, it gets.
        output: the folder to make; see :func:`check_new`.
        tensors: its parameters. metadata: of the parameter file.
        recipe: the text of its recipe instead. card: the text of a model card to go with it.

    Raises:
        InputError: if it cannot be written.
    """
    with writing(output), whole_folder(output) as place:
        for path in vocabulary_files(source.path):
            shutil.copyfile(path, place / path.name)
        made = ModelFolder(place)
        write_text(made.recipe, source.recipe.read_text(encoding="utf-8") if recipe is None else recipe)
        write_tensors(made.best, tensors, metadata)
        if card is not None:
            write_text((place / "README").with_suffix(".md"), card)


def export_model(folder: Path | str, destination: Path | str, *, card: str | None = None) -> Path:
    """Copies what translation needs, the best parameters, recipe and vocabulary, and none of the training state.

    Args:
        folder: of the model. destination: a new one.
        card: the text of a model card to go with it.

    Returns:
        The destination.

    Raises:
        InputError: if the folder holds no model or the destination cannot be written or is no new folder.
    """
    home, target = ModelFolder(folder), Path(destination)
    load_task(home.path)
    check_new(target)
    write_model(home, target, *read_tensors(home.best), card=card)
    return target
