"""What the verbs that use trained models share: options, and models from their folders."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import torch
import typer

from econmt.api import TrainedModel, load
from econmt.data.files import notice


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


def load_models(
    folders: list[Path], checkpoints: list[str] | None, device: str, threads: int | None, precision: Precision
) -> TrainedModel:
    """Load one model or those of an ensemble; errors as those of :func:`econmt.api.load`."""
    if threads is not None:
        torch.set_num_threads(threads)
    return load(folders, checkpoints or "best", device=device, precision=precision.value)


def warn(text: str) -> None:
    """Print a warning on standard error."""
    notice(f"warning: {text}")
