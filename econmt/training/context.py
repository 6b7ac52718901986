"""Context of a run: recipe, text, start, device, precision, threads and ranks, resolved once when the run begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from econmt.checkpoint.checkpoints import load_state
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.resume import Start
from econmt.checkpoint.state import TrainingState
from econmt.config.recipe import Recipe
from econmt.data.batching.store import PreparedData
from econmt.engine.communicator import Communicator
from econmt.engine.devices import resolve_device
from econmt.engine.precision import Precision, precision_of_run
from econmt.engine.threads import Threads, threads_for


@dataclass(frozen=True)
class RunContext:
    """Everything that the parts of a run share; the same on all ranks, apart from the communicator's rank.

    Attributes:
        recipe: Recipe of the run.
        folder: Its model folder, repaired (see :func:`~econmt.checkpoint.resume.find_start`).
        prepared: Its prepared text.
        start: Starting point.
        saved: State that training resumes from; None for a new run.
        device: Device that computes.
        precision: Precision of products and feature maps, as at the beginning of the run.
        communicator: Communicator of the processes that train together.
        threads: Number of CPU threads and the reason for it; None if nothing is to be said about it.
    """

    recipe: Recipe
    folder: ModelFolder
    prepared: PreparedData
    start: Start
    saved: TrainingState | None
    device: torch.device
    precision: Precision
    communicator: Communicator
    threads: Threads | None = None


def make_context(
    recipe: Recipe,
    folder: ModelFolder,
    prepared: PreparedData,
    start: Start,
    communicator: Communicator | None = None,
    threads: Threads | None = None,
) -> RunContext:
    """Makes the context of a run; ``communicator`` None means a single process. See :class:`RunContext`."""
    communicator = Communicator() if communicator is None else communicator
    device = resolve_device(recipe.training.device)
    saved = saved_state(folder, start)
    precision = _precision(recipe, saved, device, communicator)
    return RunContext(recipe, folder, prepared, start, saved, device, precision, communicator, threads)


def saved_state(folder: ModelFolder, start: Start) -> TrainingState | None:
    """Reads the state that a run resumes from; None for a new run."""
    return None if start.commit is None else load_state(folder, start.commit)


def choose_threads(
    recipe: Recipe, device: torch.device, saved: TrainingState | None, communicator: Communicator
) -> Threads:
    """Returns the run's number of threads: from the recipe, as at its beginning, or for a new run the fastest."""

    def choose() -> list[Any]:
        text = "" if saved is None else saved.environment.get("threads", "")
        began = int(text) if text.isdecimal() else 0
        return [
            *threads_for(recipe.training.threads, device, recipe.model.widest, began, communicator.local_size)
        ]

    return Threads(*communicator.on_rank_zero(choose))


def _precision(
    recipe: Recipe, saved: TrainingState | None, device: torch.device, communicator: Communicator
) -> Precision:
    """Returns the run's precision: as at its beginning, or for a new run the one chosen on rank 0."""
    local_choice: list[Precision] = []

    def choose() -> str:
        local_choice.append(precision_of_run(recipe, device, "" if saved is None else saved.precision))
        return local_choice[0].name

    name = communicator.on_rank_zero(choose)
    return local_choice[0] if local_choice else precision_of_run(recipe, device, name)
