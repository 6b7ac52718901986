"""What ranks do in tests: a run of a recipe, as ``econmt train`` does it."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from econmt.data.batch import AnyBatch
from econmt.data.store import prepare, reopen
from econmt.engine.world import World
from econmt.errors import EconmtError
from econmt.model.layers import Embedding
from econmt.recipe import load_recipe
from econmt.tasks.translation import TranslationTask
from econmt.training.folder import ModelFolder
from econmt.training.resume import Start
from econmt.training.run import make_trainer, run_recipe


def run(world: World, path: Path, text: Path, overrides: Sequence[str] = ()) -> str:
    """Trains a recipe; returns what a person was told, and in the end the error if there was one."""
    recipe = load_recipe(path, ["data.prepared=null", *overrides])
    console = Console(file=io.StringIO(), width=400)
    said = ""
    try:
        run_recipe(recipe, [text], console=console, world=world)
    except EconmtError as error:
        said = str(error)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue() + said


def state_bytes(world: World, path: Path, text: Path) -> int:
    """Bytes of optimizer state after an update."""
    recipe = load_recipe(path)
    folder = ModelFolder(path.parent / "state")
    if world.writes:
        folder.create()
        prepare(recipe, folder.prepared, [text], show_progress=False)
    world.first(lambda: None)
    prepared = reopen(recipe, folder.prepared)
    trainer, _ = make_trainer(recipe, folder, prepared, Start(), world)
    trainer.model.train()
    trainer.gradient([next(trainer.batches)])
    trainer.step.update()
    return sum(value.nbytes for state in trainer.optimizer.state.values() for value in state.values())


def reduced(world: World, _precision: str) -> Tensor:
    """The sum of gradients of a matrix that each rank draws otherwise, some of it through rows of a table."""
    draw = torch.Generator().manual_seed(world.rank)
    matrix = nn.Parameter(torch.zeros(7, 5))
    table = Embedding(100, 5)
    table.sparse = True
    reduction = world.reduction([matrix, *table.parameters()])
    assert reduction is not None
    reduction.begin()
    ids = torch.randint(0, 90, (4 + world.rank,), generator=draw)
    values = torch.randn(7, 5, generator=draw)
    loss = (matrix * values).sum() + table(ids).sum() * (1 + world.rank)
    loss.backward()
    loss = loss.detach()
    reduction.finish(loss)
    assert matrix.grad is not None
    assert table.weight.grad is not None
    return torch.cat([matrix.grad, table.weight.grad.to_dense()])


def short_of_memory(world: World, path: Path, text: Path, overrides: Sequence[str]) -> str:
    """:func:`run` in which one rank has no memory for its rows of the third batch, once."""
    real, calls = TranslationTask.loss, itertools.count()

    def loss(task: TranslationTask, model: nn.Module, batch: AnyBatch, *more: Any) -> Tensor:
        if world.rank == 1 and model.training and next(calls) == 3:
            raise MemoryError
        return real(task, model, batch, *more)

    TranslationTask.loss = loss  # type: ignore[method-assign]
    try:
        return run(world, path, text, overrides)
    finally:
        TranslationTask.loss = real  # type: ignore[method-assign]
