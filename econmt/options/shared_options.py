"""Arguments and options that several commands share, alone and in groups, and checks of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer

from econmt.config import limits
from econmt.config.recipe import Recipe, find_recipe, load_recipe, shipped_recipes
from econmt.config.yaml_reader import parse_size
from econmt.data.files import cache_folder
from econmt.data.text.corpus import search_path
from econmt.errors import InputError
from econmt.options.option_groups import argument, option

OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to change, e.g. training.seed=2."),
]
DataDirOption = Annotated[
    Path | None, typer.Option(help="Folder to search for the text, after the folder of the recipe.")
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify", help="Check the text and the prepared data completely for changes, not only a sample."
    ),
]


@dataclass(frozen=True)
class BatchChoice:
    """Changes to the batch whose training step is measured."""

    heading: ClassVar[str] = "Batch"
    bucket: str | None = option(
        None,
        help="Bucket, as source x target positions, e.g. 100x80; default: the recipe's largest bucket.",
        metavar="SxT",
    )
    batch: int | None = option(
        None, help="Number of sentence pairs, instead of the recipe's.", min=1, max=limits.BATCH
    )


def _shipped_names_that_begin(incomplete: str) -> list[str]:
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


@dataclass(frozen=True)
class RecipeChoice:
    """Recipe of a command, and changes to its keys."""

    recipe: str = argument(
        ..., help="Recipe: a YAML file or a shipped name.", autocompletion=_shipped_names_that_begin
    )
    overrides: OverridesArgument = None

    def load(self, options: Mapping[str, str | int | None] | None = None) -> Recipe:
        """Reads the recipe with its changes.

        ``options`` are values by the dotted key that they replace, None where one is not given. Raises InputError if a
        key is given both ways.
        """
        changes = list(self.overrides or ())
        for key, value in (options or {}).items():
            if value is None:
                continue
            for twice in self.overrides or ():
                if twice.partition("=")[0] == key:
                    raise InputError(
                        f"{key} is given twice, as an option ({value}) and as {twice}; give it once"
                    )
            # JSON is YAML, in which any text stands as it is.
            changes.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
        return load_recipe(self.recipe, changes)


@dataclass(frozen=True)
class TextRecipe(RecipeChoice):
    """Recipe of a command, and a folder with its text."""

    data_dir: DataDirOption = None

    @property
    def search_path(self) -> list[Path]:
        """Folders in which the text is looked up."""
        return search_path(find_recipe(self.recipe).parent, self.data_dir)


@dataclass(frozen=True)
class RunRecipe(TextRecipe):
    """Recipe of a run, the folder of its text, and its device and threads."""

    device: str | None = option(None, help="Device, instead of the recipe's: auto, cpu, cuda or cuda:N.")
    threads: int | None = option(
        None, help="Number of CPU threads, instead of the recipe's.", min=1, max=limits.THREADS
    )

    def load(self, options: Mapping[str, str | int | None] | None = None) -> Recipe:
        """Reads the recipe with its changes; see :meth:`RecipeChoice.load`."""
        device_and_threads = {"training.device": self.device, "training.threads": self.threads}
        return super().load({**device_and_threads, **(options or {})})


ModelOption = Annotated[Path, typer.Option("--model", "-m", help="Model folder.")]
NewModelOption = Annotated[Path, typer.Option("--output", "-o", help="Model folder to create.")]
CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", "-c", help="Checkpoint: best, last, or the number of an update.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="File to write; it grows line by line.", show_default="standard output"
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="Device: auto, cpu, cuda or cuda:N.")]


def _threads_option(default: str) -> Any:
    return typer.Option(min=1, max=limits.THREADS, help="Number of CPU threads.", show_default=default)


ThreadsOption = Annotated[int | None, _threads_option("as many as are fastest here")]
AllCoresOption = Annotated[int | None, _threads_option("as many as there are cores")]
"""Threads of commands that do not measure how many are fastest."""


@dataclass(frozen=True)
class ModelChoice:
    """Model or ensemble, its checkpoints, and the averaging of the ensemble."""

    heading: ClassVar[str] = "Model"
    models: list[Path] = option(
        ...,
        "--models",
        "--model",
        "-m",
        help="Model folder, or hf://OWNER/NAME; may be repeated for an ensemble.",
    )
    checkpoint: list[str] | None = option(
        None,
        "--checkpoints",
        "--checkpoint",
        "-c",
        help="Checkpoint: best, last, an update, or a parameter file; one for all models or one for each.",
        show_default="best",
    )
    ensemble_mode: Literal["linear", "log_linear"] = option(
        "linear", help="Average the probabilities of an ensemble, or their logarithms."
    )


@dataclass(frozen=True)
class Computing:
    """Device, CPU threads and precision of matrix products."""

    heading: ClassVar[str] = "Device and precision"
    device: DeviceOption = "auto"
    threads: ThreadsOption = None
    precision: str = "auto"


@dataclass(frozen=True)
class FloatComputing(Computing):
    """Device, threads and precision of commands that score."""

    precision: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        help="Precision of matrix products; auto picks the faster one on this device. 16 bits move scores by "
        "some hundredths; validation in training uses float32.",
    )


def check_writable(*paths: Path | None) -> None:
    """Raises InputError if one of the files cannot be written."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise InputError(f"{path}: a folder; give the name of a file")
        if not path.parent.is_dir():
            raise InputError(f"{path.parent}: no such folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError(f"{path}: no permission to write; give another file")


def check_picture(path: Path | None) -> None:
    """Raises InputError if a picture cannot be written, or its suffix names no image format."""
    if path is None:
        return
    check_writable(path)
    cache_folder()  # matplotlib needs one, too
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise InputError(
            f"{path}: unknown image format; give a name that ends in .{', .'.join(sorted(kinds))}"
        )


_WRITTEN_BY_ECONMT = re.compile(
    r"recipe\.yaml|metrics\.tsv|results\.json|meta\.json|state\.json|SHA256SUMS|log|\.lock|.*\.safetensors"
    r"|hypotheses\.([0-9]+|test)|subwords\..*model|vocab\..*\.txt|events\.out\..*|(train|valid|test)\.(tokens|index|lines)"
)


def check_not_of_model(path: Path | None, folders: Iterable[Path]) -> None:
    """Raises InputError if a file to write belongs to one of the models that are used."""
    if path is None or not path.exists() or not _WRITTEN_BY_ECONMT.fullmatch(path.name):
        return
    for folder in folders:
        if folder.resolve() in path.resolve().parents:
            raise InputError(f"{path}: belongs to the model in {folder}; give another file to write")


def bytes_of(option: str, text: str | None) -> int | None:
    """Returns the bytes that an option gives, as 8GiB; None if it is not given. Raises InputError for other text."""
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None
