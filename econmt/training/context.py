"""Context of a run: recipe, text, start, device, threads, precision and ranks, resolved once when the run begins.

A resumed run compares its text, vocabulary and software with those that it began with.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import econmt
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.recovery import Start
from econmt.checkpoint.state import TrainingState
from econmt.config import limits
from econmt.config.recipe import Recipe
from econmt.data.batching.store import PreparedData
from econmt.data.files import whole_file
from econmt.data.progress_bars import Heartbeat
from econmt.data.text.subwords import vocabulary_files
from econmt.engine.communicator import Communicator
from econmt.engine.devices import reproducible
from econmt.engine.precision import NAMED, Precision, precision_of_run
from econmt.engine.threads import Threads, threads_for
from econmt.errors import InputError
from econmt.training.hooks import Hook

_TEXT = (
    *(f"{split}.{kind}" for split in ("train", "valid") for kind in ("tokens", "index")),
    *("valid.source.txt", "valid.target.txt"),
)
"""Files of any prepared data that a run reads."""

_BESIDE = re.compile(r"train\.weights|(train|valid)_links\.(tokens|index)|valid\.factor\d+\.txt")
"""Files that it reads where the text has weights, alignments or factors; ids of training text include the factors."""


@dataclass(frozen=True)
class RunContext:
    """Everything that the parts of a run share; the same on all ranks, apart from the communicator's rank.

    Attributes:
        folder: Model folder of the run, repaired (see :func:`~econmt.checkpoint.recovery.find_start`).
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
    precision = NAMED[name]._replace(why=why)
    return RunContext(recipe, folder, prepared, start, saved, device, threads, precision, communicator)


def environment_of(device: torch.device) -> dict[str, str]:
    """Returns versions, device and, if the CPU computes, the number of threads, all of which affect rounding."""
    environment = {"econmt": econmt.__version__, "torch": str(torch.__version__), "device": device.type}
    return {**environment, "threads": str(torch.get_num_threads())} if device.type == "cpu" else environment


def text_fingerprint(prepared: PreparedData) -> str:
    """Returns a fingerprint of all that training and validation read: ids, lengths, weights, alignments, raw lines."""
    return _checksum_of(prepared, (*_TEXT, *filter(_BESIDE.fullmatch, sorted(prepared.checksums))))


def _checksum_of(prepared: PreparedData, names: Iterable[str]) -> str:
    return hashlib.sha256("".join(prepared.checksums[name] for name in names).encode()).hexdigest()


def copy_vocabulary(context: RunContext) -> None:
    """Copies the vocabulary files into the model folder.

    Raises:
        InputError: A resumed run began with another vocabulary.
    """
    for source in vocabulary_files(context.prepared.folder):
        content, destination = source.read_bytes(), context.folder.path / source.name
        if destination.exists() and destination.read_bytes() == content:
            continue
        if context.start.commit is not None:
            raise InputError(
                f"{destination}: the run began with another vocabulary than the prepared text has ({source}); restore "
                "the text it began with, or start anew with --overwrite-output"
            )
        with whole_file(destination) as file:
            file.write(content)


def compare(context: RunContext, saved: TrainingState, current: TrainingState) -> list[str]:
    """Compares environment and text of a saved state with the current ones; returns messages about differences.

    Raises:
        InputError: The text has changed, and the user has not allowed changes.
    """
    notes = []
    before, now = saved.environment, current.environment
    changed = [
        f"{name} {now[name]} instead of {before[name]}"
        for name in now
        if before.get(name, now[name]) != now[name]
    ]
    if changed:
        notes.append(
            f"resuming with {', '.join(changed)}: parameters will differ by rounding from those of an unchanged run"
        )
    # Older states have the fingerprint of the text alone.
    if saved.text not in (current.text, _checksum_of(context.prepared, _TEXT)):
        if not context.start.with_changes:
            raise InputError(
                f"{context.folder.path}: the run began with other text (a training or validation file, or one beside "
                "it, has changed); restore it, resume nevertheless with --resume-with-changes, or start anew with "
                "--overwrite-output"
            )
        notes.append("resuming with changed text")
    return notes
