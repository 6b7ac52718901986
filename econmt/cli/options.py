"""Arguments and options that several commands have, and checks of them before a command begins."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from econmt.cli.option_groups import recipe_option
from econmt.config import limits
from econmt.config.recipe import Recipe, find_recipe, load_recipe
from econmt.config.yaml_reader import parse_size
from econmt.data.text.corpus import search_path
from econmt.errors import InputError


def refuse_idle(context: typer.Context, why: str, *names: str) -> None:
    """Refuses options that were given and would change nothing.

    Args:
        context: context of the command.
        why: text that follows the option's name in the message.
        names: parameters of the command.

    Raises:
        InputError: one of them was given; the message names the first.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{max(parameter.opts, key=len)} {why}")


OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change, e.g. training.seed=2.")
]
DataDirOption = Annotated[
    Path | None, typer.Option(help="Folder with the text; text beside the recipe comes first.")
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify", help="Read all of the text and the prepared data for changes, not only a sample."
    ),
]


@dataclass(frozen=True)
class BatchChoice:
    """Changes to the batch whose training step is measured."""

    bucket: Annotated[
        str | None,
        typer.Option(
            metavar="SxT", help="Source x target positions, e.g. 100x80; else the recipe's worst bucket."
        ),
    ] = None
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=limits.BATCH, help="Sentence pairs, instead of the recipe's."),
    ] = None


@dataclass(frozen=True)
class RecipeChoice:
    """Recipe of a command, and changes to its keys."""

    recipe: Annotated[str, typer.Argument(help="Recipe: a YAML file or a shipped name.")]
    overrides: OverridesArgument = None

    def load(self, options: Mapping[str, str | int | None] | None = None) -> Recipe:
        """Reads the recipe with its changes.

        Args:
            options: values of options by the dotted key that they replace; None: an option is not given.

        Raises:
            InputError: the recipe cannot be used, or a key is given both ways.
        """
        changes = list(self.overrides or ())
        for key, value in (options or {}).items():
            twice = next((each for each in self.overrides or () if each.partition("=")[0] == key), None)
            if value is not None and twice is not None:
                raise InputError(f"{key} is given twice, as an option ({value}) and as {twice}; give it once")
            if value is not None:  # JSON is YAML, in which any text stands as it is
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

    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:N, instead of the recipe's.")
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=limits.THREADS, help="CPU threads, instead of the recipe's."),
    ] = None

    def load(self, options: Mapping[str, str | int | None] | None = None) -> Recipe:
        """Reads the recipe with its changes; see :meth:`RecipeChoice.load`."""
        own = {"training.device": self.device, "training.threads": self.threads}
        return super().load({**own, **(options or {})})


ModelOption = Annotated[Path, typer.Option("--model", "-m", help="Model folder.")]
NewModelOption = Annotated[Path, typer.Option("--output", "-o", help="Model folder to make.")]
CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", "-c", help="best, last, or the number of an update.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="File to write, which grows line by line.", show_default="standard output"
    ),
]
BatchSizeOption = Annotated[
    int | None, recipe_option("decoding.batch_size", help="Lines processed together.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option(min=1, max=limits.THREADS, help="CPU threads.", show_default="as many as are fastest here"),
]


@dataclass(frozen=True)
class ModelChoice:
    """Models that work as one, their checkpoints, and how an ensemble averages."""

    models: Annotated[
        list[Path],
        typer.Option(
            "--models", "--model", "-m", help="Model folder, or hf://OWNER/NAME; several make an ensemble."
        ),
    ]
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoints",
            "--checkpoint",
            "-c",
            help="best, last, the number of an update, or a parameter file; one for all models or one for each.",
            show_default="best",
        ),
    ] = None
    ensemble_mode: Annotated[
        Literal["linear", "log_linear"], typer.Option(help="Average probabilities, or log-probabilities.")
    ] = "linear"


@dataclass(frozen=True)
class Computing:
    """Device, CPU threads and precision of matrix products with which models compute."""

    device: DeviceOption = "auto"
    threads: ThreadsOption = None
    precision: str = "auto"


@dataclass(frozen=True)
class FloatComputing(Computing):
    """Device, threads and precision of commands that score."""

    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(
            help="Precision of matrix products; auto picks the faster one on this device. bfloat16 moves scores by "
            "some hundredths; validation in training uses float32.",
        ),
    ] = "auto"


def check_writable(*paths: Path | None) -> None:
    """Refuse files that are to be written where they cannot be.

    Raises:
        InputError: a path is a folder, is in none, or may not be written.
    """
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
    """Refuse pictures that cannot be written.

    Raises:
        InputError: as :func:`check_writable`, or the suffix names no kind of picture.
    """
    if path is None:
        return
    check_writable(path)
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise InputError(f"{path}: no kind of picture; give a name that ends in .{', .'.join(sorted(kinds))}")


_WRITTEN_BY_ECONMT = re.compile(
    r"recipe\.yaml|metrics\.tsv|results\.json|meta\.json|state\.json|SHA256SUMS|log|\.lock|.*\.safetensors"
    r"|hypotheses\.([0-9]+|test)|subwords\..*model|vocab\..*\.txt|events\.out\..*|(train|valid|test)\.(tokens|index|lines)"
)


def check_not_of_model(path: Path | None, folders: Iterable[Path]) -> None:
    """Refuse to write over a file of a model that is being used.

    Raises:
        InputError: the path is one.
    """
    if path is None or not path.exists() or not _WRITTEN_BY_ECONMT.fullmatch(path.name):
        return
    for folder in folders:
        if folder.resolve() in path.resolve().parents:
            raise InputError(f"{path}: belongs to the model in {folder}; give another file to write")


def bytes_of(option: str, text: str | None) -> int | None:
    """The bytes that an option names, as in 8GiB; None if it is not given.

    Raises:
        InputError: it names none.
    """
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None
