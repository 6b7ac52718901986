"""What the verbs that use trained models share: options, and models from their folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

import torch
import typer

from econmt.data.files import notice
from econmt.data.subwords import Vocabularies, fingerprint
from econmt.decoding.search import SearchOptions
from econmt.engine.devices import resolve_device
from econmt.engine.precision import precision_of
from econmt.errors import InputError
from econmt.model.translation import TranslationModel
from econmt.recipe import Recipe
from econmt.training.checkpoints import load_model


class Averaging(str, Enum):
    """How an ensemble's models are averaged, in Sockeye's words."""

    linear = "linear"
    log_linear = "log_linear"


class Precision(str, Enum):
    """Of products; auto is what is faster on the device."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


# typer reads annotations at run time, on Python 3.10 too: hence Optional.
ModelsOption = Annotated[
    list[Path],
    typer.Option(
        "--models", "--model", "-m", help="Model folder; several make an ensemble.", show_default=False
    ),
]
CheckpointOption = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--checkpoints",
        "--checkpoint",
        "-c",
        help="best, last, the number of an update, or a parameter file; one for all models or one for each.",
        show_default="best",
    ),
]
EnsembleOption = Annotated[
    Averaging, typer.Option("--ensemble-mode", help="Average probabilities, or log-probabilities.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
ThreadsOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--threads", min=1, help="CPU threads.", show_default="as many as there are cores"),
]
PrecisionOption = Annotated[
    Precision,
    typer.Option(
        "--precision",
        help="Of products; auto: what is faster here. bfloat16 moves scores by some hundredths; training translates in "
        "float32.",
    ),
]
OutputOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--output", "-o", help="File to write when all is done.", show_default="standard output"),
]
BatchSizeOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--batch-size", min=1, help="Lines processed together.", show_default="the recipe's"),
]
AlphaOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        "--length-penalty-alpha",
        min=0.0,
        help="Scores are divided by ((beta + length) / (beta + 1)) ** alpha.",
        show_default="the recipe's",
    ),
]
BetaOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        "--length-penalty-beta", min=0.0, help="See --length-penalty-alpha.", show_default="the recipe's"
    ),
]


class LoadedModels(NamedTuple):
    """Models with the same vocabularies on one device; the recipe is the first one's."""

    models: list[TranslationModel]
    vocabularies: Vocabularies
    recipe: Recipe
    device: torch.device
    precision: torch.dtype


def load_models(
    folders: Sequence[Path],
    checkpoints: Sequence[str] | None,
    device: str,
    threads: int | None,
    precision: Precision,
) -> LoadedModels:
    """Load one model or those of an ensemble.

    Raises:
        InputError: naming the folder, if a model cannot be loaded, or if its vocabularies are not the first one's.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    place = resolve_device(device)
    chosen = list(checkpoints or ["best"])
    if len(chosen) not in (1, len(folders)):
        raise InputError(
            f"--checkpoint is given {len(chosen)} times for {len(folders)} models; give it once, or once for each"
        )
    chosen *= len(folders) // len(chosen)
    loaded = [
        load_model(folder, Path(which) if which.endswith(".safetensors") else which, place)
        for folder, which in zip(folders, chosen, strict=True)
    ]
    for folder in folders[1:]:
        if fingerprint(folder) != fingerprint(folders[0]):
            raise InputError(
                f"{folder}: its vocabularies differ from those of {folders[0]}; models of an ensemble must share them"
            )
    first = loaded[0]
    products = precision_of(precision.value, place, [each.recipe for each in loaded]).dtype
    return LoadedModels(
        [each.model for each in loaded],
        first.vocabularies,
        first.recipe,
        place,
        products,
    )


def search_options(recipe: Recipe, given: Mapping[str, Any]) -> SearchOptions:
    """The recipe's search with what the user gave; None stands for what was not given.

    Raises:
        InputError: if a value is out of range.
    """
    changes = {name: value for name, value in given.items() if value is not None}
    try:
        return replace(SearchOptions.from_recipe(recipe.decoding), **changes)
    except ValueError as error:
        raise InputError(str(error)) from None


def warn(text: str) -> None:
    """Print a warning on standard error."""
    notice(f"warning: {text}")
