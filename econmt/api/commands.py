"""Declaration of commands like those of ``econmt``, for programs that bring one of their own.

A command is a function with typed parameters. The default of a parameter is made by :func:`option`, :func:`argument`,
or :func:`recipe_option`, which takes text and bounds from a key of recipes. A parameter whose type is a dataclass with
such fields stands for a group of options: :class:`Computing`, :class:`WordLists`, or a class of the program.
:func:`with_option_groups` makes a function for typer of it::

    def shout(
        text: str = argument(..., help="Line to translate."),
        model: list[Path] = option(..., "--model", "-m", help="Model folder."),
        *,
        computing: SearchComputing,
    ) -> None:
        print(load_models(model, computing).translate([text])[0].text.upper())

    typer.run(with_option_groups(shout))

``econmt serve`` and ``econmt distill`` are made in this way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from econmt import errors
from econmt.api.interface import load
from econmt.api.language_model import refuse_language_model
from econmt.api.saved_model import SavedModel
from econmt.api.translation import TrainedModel
from econmt.config import limits as limits
from econmt.data.files import notice as notice
from econmt.data.progress_bars import status_line as status_line
from econmt.data.text.corpus import read_lines as read_lines
from econmt.engine.devices import give_back_library_pages, resolve_device
from econmt.engine.precision import LEAST_SIZE, int8_pays
from econmt.engine.threads import crowded, missing_library
from econmt.engine.threads import usable_cores as usable_cores
from econmt.errors import printable as printable
from econmt.options.option_groups import argument as argument
from econmt.options.option_groups import option as option
from econmt.options.option_groups import recipe_option as recipe_option
from econmt.options.option_groups import with_option_groups as with_option_groups
from econmt.options.search_options import RestoreCase as RestoreCase
from econmt.options.search_options import SearchComputing as SearchComputing
from econmt.options.search_options import WordLists as WordLists
from econmt.options.shared_options import Computing as Computing
from econmt.options.shared_options import DataDirOption as DataDirOption
from econmt.options.shared_options import OverridesArgument as OverridesArgument
from econmt.training.interrupts import Interrupted as Interrupted
from econmt.training.interrupts import Interrupts as Interrupts
from econmt_memory.report.tables import print_table as print_table
from econmt_memory.report.tables import table_console as table_console


def load_models(
    models: Sequence[Path], computing: Computing, checkpoints: Sequence[str] | None = None
) -> TrainedModel:
    """Loads a translation model, or an ensemble, as a command does: tells of it, and warns of a slow machine.

    Args:
        models: model folders.
        computing: options of device, threads and precision.
        checkpoints: checkpoint of all models, or one for each; None: the best ones.

    Raises:
        InputError: if a model cannot be loaded or is a language model, or the vocabularies of an ensemble differ.
    """
    loaded = load_any(models, computing, checkpoints)
    refuse_language_model(loaded, models[0])
    return loaded


def load_any(
    models: Sequence[Path], computing: Computing, checkpoints: Sequence[str] | None = None
) -> TrainedModel:
    """Loads translation models, or a language model, as :func:`load_models` does."""
    with status_line() as say:
        say(f"loading {', '.join(map(str, models))}")
        loaded = load(
            list(models),
            checkpoints or "best",
            device=computing.device,
            precision=computing.precision,
            threads=computing.threads or "auto",
        )
    if loaded.device.type == "cpu":
        warn_of_slowness()
        give_back_library_pages()
    return loaded


def precision_for_sentences(models: Sequence[Path], computing: Computing) -> str:
    """Chooses the precision in which models translate single sentences fastest, where the options leave it open.

    A process makes the choice between int8 and other precisions once, so that models which are loaded again keep it.

    Args:
        models: model folders.
        computing: options of device, threads and precision.

    Returns:
        The precision of ``computing`` unless it is auto; else int8 if that is faster on this CPU, for models that are
        large enough, or auto.
    """
    if computing.precision != "auto" or resolve_device(computing.device).type != "cpu" or not _prefers_int8():
        return computing.precision
    # Loading reports the error of a folder without a recipe.
    recipes = [SavedModel(folder).recipe for folder in models]
    widest = max((recipe.model.widest for recipe in recipes if recipe is not None), default=0)
    return "int8" if widest >= LEAST_SIZE else "auto"


@functools.cache
def _prefers_int8() -> bool:
    return int8_pays()


def is_quiet() -> bool:
    """Returns True if ``econmt --quiet`` was called, which prints warnings and results only."""
    return errors.quiet


def warn_of_slowness() -> None:
    """Warns if there are more threads than free cores, or if the C library is missing."""
    line = crowded(torch.get_num_threads())
    if line is not None:
        notice(f"warning: {line}")
    _warn_of_library()


@functools.cache  # once in a process
def _warn_of_library() -> None:
    line = missing_library()
    if line is not None:
        notice(f"warning: {line}")
