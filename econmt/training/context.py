"""Context of a run: recipe, text, start, device, threads, precision and ranks, resolved once when the run begins."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.resume import Start
from econmt.checkpoint.state import TrainingState
from econmt.config import limits
from econmt.config.recipe import Recipe
from econmt.data.batching.store import PreparedData
from econmt.data.progress_bars import Heartbeat
from econmt.engine.communicator import Communicator
from econmt.engine.devices import reproducible
from econmt.engine.precision import Precision, precision_of, precision_of_run
from econmt.engine.threads import Threads, threads_for
from econmt.training.hooks import Hook


@dataclass(frozen=True)
class RunContext:
    """Everything that the parts of a run share; the same on all ranks, apart from the communicator's rank.

    Attributes:
        folder: Model folder of the run, repaired (see :func:`~econmt.checkpoint.resume.find_start`).
        saved: State that training resumes from; None for a new run.
        began: Time on the clock time.monotonic() from which the seconds of the run count.
        heartbeat: Heartbeat that reports what the run is doing.
        hook: Judges the translations of every checkpoint.
    """

    recipe: Recipe
    folder: ModelFolder
    prepared: PreparedData
    start: Start
    saved: TrainingState | None
    device: torch.device
    threads: Threads
    precision: Precision
    communicator: Communicator
    began: float = field(default_factory=time.monotonic)
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(math.inf))
    hook: Hook | None = None


def make_context(
    recipe: Recipe,
    folder: ModelFolder,
    prepared: PreparedData,
    start: Start,
    saved: TrainingState | None,
    device: torch.device,
    communicator: Communicator,
) -> RunContext:
    """Makes the context of a run; rank 0 chooses threads and precision for all. See :class:`RunContext`."""
    began = 0 if saved is None else limits.natural(saved.environment.get("threads", "")) or 0

    def choose_threads() -> list[Any]:
        width, processes = recipe.model.widest, communicator.local_size
        return [*threads_for(recipe.training.threads, device, width, began, processes)]

    def choose_precision() -> list[str]:
        chosen = precision_of_run(recipe, device, "" if saved is None else saved.precision)
        return [chosen.name, chosen.why]

    threads = Threads(*communicator.on_rank_zero(choose_threads))
    with reproducible(device, threads.number):
        name, why = communicator.on_rank_zero(choose_precision)
    precision = precision_of(name, device)._replace(why=why)
    return RunContext(recipe, folder, prepared, start, saved, device, threads, precision, communicator)
