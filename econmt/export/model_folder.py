"""Model folders made from others: without what only training needs, or with matrices of 8 or 16 bits."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from econmt.checkpoint.checkpoints import check_model, check_vocabulary, load_task, parameter_file
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.tensor_files import quantized, read_tensors, write_tensors, write_text
from econmt.config.recipe import Recipe, read_recipe
from econmt.data.files import whole_folder
from econmt.data.text.subwords import fingerprint, vocabulary_files
from econmt.errors import InputError

ADVICE = "give a folder that econmt train, average or export wrote"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Reads the rows of a metrics.tsv, a table of numbers; none if there is no such file."""
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = csv.DictReader(lines, delimiter="\t", strict=True)
            metrics = [{column: float(value) for column, value in row.items()} for row in rows]
            return [{**row, "update": int(row["update"])} for row in metrics]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, OverflowError, csv.Error) as error:
        raise InputError(f"{path}: not a table of metrics ({error}); {ADVICE}") from None


def recipe_of(folder: ModelFolder, command: str | None = None) -> Recipe:
    """Reads the recipe of a model folder, which must translate if a ``command`` that needs this is named.

    Raises:
        InputError: There is no such folder, it is no model folder, or it holds a model of another kind.
    """
    if not folder.path.is_dir():
        raise InputError(f"{folder.path}: no such folder; {ADVICE}")
    if not folder.recipe.is_file():
        raise InputError(f"{folder.path}: not a model folder, it has no readable recipe.yaml; {ADVICE}")
    recipe = read_recipe(folder.recipe)
    if command is not None and recipe.task != "translation":
        raise InputError(f"{folder.path}: holds a language model; {command} takes a translation model")
    return recipe


def check_new(output: Path) -> None:
    """Raises InputError if a folder to be created exists already and is not empty."""
    if Path(os.path.realpath(output)).is_symlink():
        raise InputError(f"{output}: a link that leads to itself; use a new folder")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: exists already; use a new folder")


@contextmanager
def new_folder(source: Path, output: Path) -> Iterator[Path]:
    """Creates a folder ``output``, which must be new, with the vocabulary of a model folder.

    The block fills it under a temporary name; then it is renamed, so that it is complete or absent.

    Raises:
        InputError: The folder cannot be written.
    """
    with whole_folder(output) as temporary:
        for path in vocabulary_files(source):
            shutil.copyfile(path, temporary / path.name)
        yield temporary


class DerivedModel:
    """New model folder made from parameters of another one, with its vocabulary.

    Raises:
        InputError: See :func:`recipe_of`; or the output exists.
    """

    def __init__(self, source: Path, output: Path, command: str | None = None) -> None:
        self.folder, self._output = ModelFolder(source), Path(output)
        self.recipe = recipe_of(self.folder, command)
        check_new(self._output)

    def read(self, checkpoint: str | int) -> tuple[Path, dict[str, Tensor], dict[str, str]]:
        """Reads the parameter file "best", "last", or that of an update; returns its path, tensors and metadata.

        Raises:
            InputError: There is no such file, it is broken, or it belongs to another vocabulary or model.
        """
        path = parameter_file(self.folder, checkpoint)
        tensors, metadata = read_tensors(path)
        check_vocabulary(metadata, fingerprint(self.folder.path), path)
        check_model(metadata, self.recipe.model, path)
        return path, tensors, metadata

    def write(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], card: str | None = None
    ) -> None:
        """Writes the new folder, with the text of a model card if there is one.

        Raises:
            InputError: The folder cannot be written.
        """
        with new_folder(self.folder.path, self._output) as temporary:
            made = ModelFolder(temporary)
            write_text(made.recipe, self.folder.recipe.read_text(encoding="utf-8"))
            write_tensors(made.best, tensors, metadata)
            if card is not None:
                write_text((temporary / "README").with_suffix(".md"), card)


def export_model(folder: Path | str, destination: Path | str, *, card: str | None = None) -> Path:
    """Copies the files that translation needs: best parameters, recipe and vocabulary.

    Returns:
        The destination.

    Raises:
        InputError: The folder holds no model, or the destination exists or cannot be written.
    """
    derived = DerivedModel(Path(folder), Path(destination))
    load_task(folder)
    derived.write(*read_tensors(derived.folder.best), card=card)
    return Path(destination)


def quantize_model(
    model: Path,
    output: Path,
    precision: Literal["int8", "bfloat16"] = "int8",
    checkpoint: str | int = "best",
    say: Callable[[str], object] = lambda _: None,
) -> tuple[int, int]:
    """Writes a new model folder with the matrices of a model in another precision.

    Args:
        model: Model folder. output: Folder to create.
        precision: Precision of the matrices.
        checkpoint: Parameters: best, last, or the number of an update.
        say: Called with the current activity.

    Returns:
        Bytes of the parameters before and after.

    Raises:
        InputError: The model cannot be read or has such matrices already, or the folder cannot be written.
    """
    derived = DerivedModel(model, output, "econmt quantize")
    say(f"reading {model}")
    path, tensors, metadata = derived.read(checkpoint)
    if metadata.get("quantized"):
        raise InputError(
            f"{path}: its matrices are {metadata['quantized']} already; quantize the model that it was made from"
        )
    made = quantized(tensors, getattr(torch, precision), path)
    say(f"writing {output}")
    derived.write(made, {**metadata, "quantized": precision})
    before, after = (sum(tensor.nbytes for tensor in state.values()) for state in (tensors, made))
    return before, after
