"""Writes model folders for translation, without training state."""

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
    """Raises InputError if a folder to be created exists already and is not empty."""
    if Path(os.path.realpath(output)).is_symlink():
        raise InputError(f"{output}: a link that leads to itself; use a new folder")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: exists already; use a new folder")


def write_model(
    source: ModelFolder,
    output: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    recipe: str | None = None,
    card: str | None = None,
) -> None:
    """Writes a model folder under a temporary name and renames it, so that it is complete or absent.

    Args:
        source: Model folder whose vocabulary and recipe are copied.
        output: Folder to create; see :func:`check_new`.
        tensors: Parameters.
        metadata: Metadata of the parameter file.
        recipe: Text of a recipe that replaces the copied one.
        card: Text of a model card to add.

    Raises:
        InputError: The folder cannot be written.
    """
    with writing(output), whole_folder(output) as temporary:
        for path in vocabulary_files(source.path):
            shutil.copyfile(path, temporary / path.name)
        model_folder = ModelFolder(temporary)
        write_text(
            model_folder.recipe, source.recipe.read_text(encoding="utf-8") if recipe is None else recipe
        )
        write_tensors(model_folder.best, tensors, metadata)
        if card is not None:
            write_text((temporary / "README").with_suffix(".md"), card)


def export_model(folder: Path | str, destination: Path | str, *, card: str | None = None) -> Path:
    """Copies the files that translation needs: best parameters, recipe and vocabulary.

    Args:
        folder: Model folder.
        destination: Folder to create.
        card: Text of a model card to add.

    Returns:
        The destination.

    Raises:
        InputError: The folder holds no model, or the destination exists or cannot be written.
    """
    source, target = ModelFolder(folder), Path(destination)
    load_task(source.path)
    check_new(target)
    write_model(source, target, *read_tensors(source.best), card=card)
    return target
