"""Model folders made from others: what translation needs, and no training state."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from econmt.data.files import sync_folder, writing
from econmt.data.subwords import vocabulary_files
from econmt.errors import InputError
from econmt.training.checkpoints import load_model
from econmt.training.folder import ModelFolder
from econmt.training.tensor_files import write_tensors, write_text


def check_new(output: Path) -> None:
    """Raises InputError if a folder to be made is there already and not empty."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: exists already; give a new folder")


def write_model(
    source: ModelFolder,
    output: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    recipe: str | None = None,
) -> None:
    """Writes a model folder under a temporary name and renames it, so that it is whole or not there.

    Args:
        source: whose vocabulary, and recipe, it gets.
        output: the folder to make; see :func:`check_new`.
        tensors: its parameters. metadata: of the parameter file.
        recipe: the text of its recipe instead.

    Raises:
        InputError: if it cannot be written.
    """
    temporary = output.with_name(f".{output.name}.{os.getpid()}.partial")
    with writing(output):
        try:
            temporary.mkdir(parents=True)
            for path in vocabulary_files(source.path):
                shutil.copyfile(path, temporary / path.name)
            made = ModelFolder(temporary)
            write_text(made.recipe, source.recipe.read_text(encoding="utf-8") if recipe is None else recipe)
            write_tensors(made.best, tensors, metadata)
            if output.is_dir():
                output.rmdir()
            temporary.rename(output)
            sync_folder(output.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def export_model(folder: Path | str, destination: Path | str) -> Path:
    """Copies what translation needs, the best parameters, recipe and vocabulary, and none of the training state.

    Returns:
        The destination.

    Raises:
        InputError: if the folder holds no model or the destination cannot be written or holds one already.
    """
    home, target = ModelFolder(folder), ModelFolder(destination)
    load_model(home.path)
    if target.best.exists() or target.recipe.exists():
        raise InputError(f"{target.path}: holds a model already; give a new folder")
    vocabulary = [path for path in home.path.iterdir() if path.name.startswith(("subwords.", "vocab."))]
    try:
        target.path.mkdir(parents=True, exist_ok=True)
        for path in (home.recipe, *sorted(vocabulary), home.best):
            shutil.copyfile(path, target.path / path.name)
    except OSError as error:
        raise InputError(
            f"{target.path}: cannot be written ({error.strerror}); give another folder"
        ) from error
    return target.path
