"""What ranks do in tests: a run of a recipe, as ``econmt train`` does it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from econmt.engine.world import World
from econmt.errors import EconmtError
from econmt.recipe import load_recipe
from econmt.training.folder import ModelFolder
from econmt.training.run import run_recipe


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


def folder_of(path: Path, overrides: Sequence[str] = ()) -> ModelFolder:
    """The folder of a run."""
    return ModelFolder(load_recipe(path, overrides).output)
