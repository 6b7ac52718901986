"""Arguments and options that several verbs have, and what is checked of them before a verb begins."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from econmt.errors import InputError
from econmt.typed_yaml import parse_size


class AveragingMode(str, Enum):
    """How an ensemble's models are averaged, in Sockeye's words."""

    linear = "linear"
    log_linear = "log_linear"


class ProductPrecision(str, Enum):
    """Of products; auto is what is faster on the device."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


RecipeArgument = Annotated[str, typer.Argument(help="Recipe: a YAML file or a shipped name.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change, e.g. training.seed=2.")
]
DataDirOption = Annotated[Path | None, typer.Option(help="Folder with the text, looked at first.")]
ModelOption = Annotated[Path, typer.Option("--model", "-m", help="Model folder.")]
NewModelOption = Annotated[Path, typer.Option("--output", "-o", help="Model folder to make.")]
ModelsOption = Annotated[
    list[Path],
    typer.Option("--models", "--model", "-m", help="Model folder; several make an ensemble."),
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
    int | None, typer.Option(min=1, help="CPU threads.", show_default="as many as there are cores")
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
    typer.Option("--output", "-o", help="File to write when all is done.", show_default="standard output"),
]
BatchSizeOption = Annotated[
    int | None, typer.Option(min=1, help="Lines processed together.", show_default="the recipe's")
]
AlphaOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Scores are divided by ((beta + length) / (beta + 1)) ** alpha.",
        show_default="the recipe's",
    ),
]
BetaOption = Annotated[
    float | None, typer.Option(min=0.0, help="See --length-penalty-alpha.", show_default="the recipe's")
]
BucketOption = Annotated[
    str | None,
    typer.Option(
        metavar="SxT", help="Source x target positions, e.g. 100x80; else the recipe's worst bucket."
    ),
]
PairsOption = Annotated[
    int | None, typer.Option("--batch", min=1, help="Sentence pairs, instead of the recipe's.")
]


def check_writable(*paths: Path | None) -> None:
    """Refuse files that are to be written where they cannot be.

    Raises:
        InputError: a path is a folder, or is in none.
    """
    for path in paths:
        if path is not None and path.is_dir():
            raise InputError(f"{path}: a folder; give the name of a file")
        if path is not None and not path.parent.is_dir():
            raise InputError(f"{path.parent}: no such folder")


def bytes_of(option: str, text: str | None) -> int | None:
    """The bytes that an option names, as in 8GiB; None if it is not given.

    Raises:
        InputError: it names none.
    """
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None
