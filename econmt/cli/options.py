"""Arguments and options that several verbs have, and what is checked of them before a verb begins."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeVar, Union

import typer

from econmt.config import limits
from econmt.config.yaml_reader import parse_size
from econmt.errors import InputError

Numbers = TypeVar("Numbers", bound=Union[float, Sequence[float], None])


def within(least: float, most: float, *, above: bool = False) -> Callable[[Numbers], Numbers]:
    """Returns a typer callback that checks one or several floating-point numbers.

    Its own bounds let pass what is not a number, and infinity.

    Args:
        least: the smallest number allowed, or if ``above`` the largest that is not.
        most: the largest.
        above: see ``least``.
    """

    def check(given: Numbers) -> Numbers:
        for value in given if isinstance(given, Sequence) else [given]:
            fits = value is None or (math.isfinite(value) and least <= value <= most)
            if not fits or (above and value == least):
                raise typer.BadParameter(
                    f"must be {'more than' if above else 'at least'} {least:g} and at most {most:g}, found {value}"
                )
        return given

    return check


def refuse_idle(context: typer.Context, why: str, *names: str) -> None:
    """Refuse options that were given and would change nothing.

    Args:
        context: of the command.
        why: what follows the option's name in the message.
        names: of the parameters of the command's function.

    Raises:
        InputError: naming the first of them.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{max(parameter.opts, key=len)} {why}")


def as_overrides(overrides: Sequence[str] | None, said: Mapping[str, str | int | None]) -> list[str]:
    """Overrides of a recipe, and what options say of its keys, as it stands: no text is read as YAML.

    Args:
        overrides: as they were given.
        said: by key; None: that option is not given.

    Raises:
        InputError: a key is given both ways.
    """
    found = list(overrides or ())
    for key, value in said.items():
        twice = next((each for each in overrides or () if each.partition("=")[0] == key), None)
        if value is not None and twice is not None:
            raise InputError(f"{key} is given twice, as an option ({value}) and as {twice}; give it once")
        if value is not None:
            found.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
    return found


class AveragingMode(str, Enum):
    """Averaging of an ensemble's models, by Sockeye's names."""

    linear = "linear"
    log_linear = "log_linear"


class ProductPrecision(str, Enum):
    """Precision of matrix products; auto picks the faster one on this device."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


RecipeArgument = Annotated[str, typer.Argument(help="Recipe: a YAML file or a shipped name.")]
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
ModelOption = Annotated[Path, typer.Option("--model", "-m", help="Model folder.")]
NewModelOption = Annotated[Path, typer.Option("--output", "-o", help="Model folder to make.")]
ModelsOption = Annotated[
    list[Path],
    typer.Option(
        "--models",
        "--model",
        "-m",
        help="Model folder, or hf://OWNER/NAME; several make an ensemble.",
    ),
]
CheckpointsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoints",
        "--checkpoint",
        "-c",
        help="best, last, the number of an update, or a parameter file; one for all models or one for each.",
        show_default="best",
    ),
]
EnsembleOption = Annotated[AveragingMode, typer.Option(help="Average probabilities, or log-probabilities.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
RecipeDeviceOption = Annotated[
    str | None, typer.Option(help="auto, cpu, cuda or cuda:N, instead of the recipe's.")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(min=1, max=limits.THREADS, help="CPU threads.", show_default="as many as are fastest here"),
]
RecipeThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=limits.THREADS, help="CPU threads, instead of the recipe's."),
]
BenchThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, max=limits.THREADS, help="CPU threads.", show_default="as many as there are cores"
    ),
]
InputLengthOption = Annotated[
    int | None,
    typer.Option(
        "--max-input-length",
        min=1,
        max=limits.INPUT_LENGTH,
        help="Longest sentence, in tokens, taken whole; score refuses longer ones.",
        show_default="the recipe's",
    ),
]
PrecisionOption = Annotated[
    ProductPrecision,
    typer.Option(
        help="Of products; auto: what is faster here. bfloat16 moves scores by some hundredths; training translates in "
        "float32.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="File to write, which grows line by line.", show_default="standard output"
    ),
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(min=1, max=limits.TRANSLATED, help="Lines processed together.", show_default="the recipe's"),
]
AlphaOption = Annotated[
    float | None,
    typer.Option(
        callback=within(0.0, limits.LENGTH_PENALTY_ALPHA),
        help="Scores are divided by ((beta + length) / (beta + 1)) ** alpha.",
        show_default="the recipe's",
    ),
]
BetaOption = Annotated[
    float | None,
    typer.Option(
        callback=within(0.0, limits.LENGTH_PENALTY_BETA),
        help="See --length-penalty-alpha.",
        show_default="the recipe's",
    ),
]
BucketOption = Annotated[
    str | None,
    typer.Option(
        metavar="SxT", help="Source x target positions, e.g. 100x80; else the recipe's worst bucket."
    ),
]
PairsOption = Annotated[
    int | None,
    typer.Option("--batch", min=1, max=limits.BATCH, help="Sentence pairs, instead of the recipe's."),
]


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
