"""What ranks do in tests: a run of a recipe, as ``econmt train`` does it."""

from __future__ import annotations

import io
import itertools
import os
import signal
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from rich.console import Console
from torch import Tensor, distributed, nn

from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.recovery import Start
from econmt.config.recipe import load_recipe
from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.store import open_prepared, prepare
from econmt.engine.communicator import Communicator
from econmt.engine.step import StepResult, TrainingStep
from econmt.errors import EconmtError
from econmt.parallel import processes
from econmt.tasks.translation import TranslationTask
from econmt.training import ranks
from econmt.training.progress import Progress
from econmt.training.run import make_trainer, run_recipe
from econmt.training.trainer import Trainer
from tests.conftest import PATIENCE
from tests.unit.training.tiny import context_of


def run(communicator: Communicator, path: Path, text: Path, overrides: Sequence[str] = ()) -> str:
    """Trains a recipe; returns what a person was told, and in the end the error if there was one."""
    recipe = load_recipe(path, ["data.prepared=null", *overrides])
    console = Console(file=io.StringIO(), width=400)
    said = ""
    try:
        run_recipe(recipe, [text], console=console, communicator=communicator)
    except EconmtError as error:
        said = str(error)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue() + said


def parts(communicator: Communicator, path: Path, text: Path) -> list[bool]:
    """Whether ranks could exchange before a run of this process, and can after it; and it ended as it should."""
    before = distributed.is_initialized()
    said = run(communicator, path, text)
    return [before, distributed.is_initialized(), communicator.rank > 0 or "training ended" in said]


def run_elsewhere(communicator: Communicator, path: Path, text: Path) -> str:
    """:func:`run` in which rank 1 has another folder than the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "SEEN_WITHIN", 0.0)
        return run(communicator, path, text, [f"output={path.parent / f'run{communicator.rank}'}"])


def leave_at(communicator: Communicator, path: Path, text: Path, update: int) -> str:
    """:func:`run` in which rank 1 gets SIGTERM when it has done so many updates."""
    real = Trainer._update

    def done(trainer: Trainer, progress: Progress) -> None:
        real(trainer, progress)
        if communicator.rank == 1 and trainer.state.update == update:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_update", done)
        return run(communicator, path, text)


def run_slowly(communicator: Communicator, path: Path, text: Path) -> str:
    """:func:`run` whose rank 1 takes long by its clock."""
    real = TrainingStep.gradient

    def gradient(step: TrainingStep, *arguments: Any, **options: Any) -> StepResult:
        found = real(step, *arguments, **options)
        step.seconds += communicator.rank * 5000.0
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "gradient", gradient)
        return run(communicator, path, text)


def hang(communicator: Communicator) -> list[str]:
    """Rank 1 does not come to an exchange; the lines that this rank tells before it leaves, which it does not here."""
    said: list[str] = []
    left = threading.Event()

    def leave(_: int) -> NoReturn:
        left.set()
        raise SystemExit

    communicator.note(7)
    control = communicator._control  # type: ignore[attr-defined]
    assert control._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=600)
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=0.1), control)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "talk", said.append)
        patch.setattr(processes, "_ROLL_CALL", PATIENCE)
        patch.setattr(processes.time, "sleep", left.wait)
        patch.setattr(os, "_exit", leave)
        if communicator.rank == 0:
            with pytest.raises(SystemExit):
                communicator.all_reduce_max(1)
        assert left.wait(PATIENCE)
    return said


def trainer_of(communicator: Communicator, path: Path, text: Path, overrides: Sequence[str] = ()) -> Trainer:
    """A trainer that has done no update."""
    recipe = load_recipe(path, overrides)
    folder = ModelFolder(path.parent / "state")
    if communicator.is_rank_zero:
        folder.create()
        prepare(recipe, folder.prepared, [text], show_progress=False)
    communicator.on_rank_zero(lambda: None)
    prepared = open_prepared(folder.prepared)
    trainer, _ = make_trainer(context_of(recipe, folder, prepared, Start(), communicator))
    trainer.model.train()
    return trainer


def float16_updates(
    communicator: Communicator, path: Path, text: Path, overrides: Sequence[str]
) -> list[list[float]]:
    """Loss scale, skipped updates and sum of all parameters after five updates, in which either rank overflows once."""
    trainer = trainer_of(communicator, path, text, overrides)
    real = TranslationTask.loss

    def loss(task: TranslationTask, *arguments: Any) -> Tensor:
        overflows = {2: 0, 4: 1}.get(trainer.state.update) == communicator.rank
        return real(task, *arguments) * (1e30 if overflows else 1.0)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TranslationTask, "loss", loss)
        for _ in range(5):
            trainer._update(Progress.silent())
            total = sum(float(part.double().sum()) for part in trainer.parameters.values())
            found.append([trainer.step.loss_scale.state()[0], float(trainer.state.skipped), total])
    return found


def short_of_memory(communicator: Communicator, path: Path, text: Path, overrides: Sequence[str]) -> str:
    """:func:`run` in which one rank has no memory for its rows of the third batch, once."""
    real, calls = TranslationTask.loss, itertools.count()

    def loss(task: TranslationTask, model: nn.Module, batch: AnyBatch, *more: Any) -> Tensor:
        if communicator.rank == 1 and model.training and next(calls) == 3:
            raise MemoryError
        return real(task, model, batch, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TranslationTask, "loss", loss)
        return run(communicator, path, text, overrides)
