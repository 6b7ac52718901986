"""Checks whether a run in a folder may be resumed under a recipe, and from which state."""

from __future__ import annotations

from typing import NamedTuple

from econmt.checkpoint.folder import Commit, ModelFolder
from econmt.checkpoint.recovery import recover
from econmt.config.conditions import keys_without_effect
from econmt.config.recipe import Recipe, differing_keys, read_recipe
from econmt.config.yaml_reader import plain_text
from econmt.errors import InputError

FREE_KEYS = frozenset(
    {
        "name",
        "output",
        "data.test",
        "data.prepared",
        "ops.encoder",
        "ops.decoder",
        "ops.attention",
        "ops.output",
        "ops.stash",
        "training.memory_budget",
        "training.max_updates",
        "training.max_epochs",
        "training.max_tokens",
        "training.max_seconds",
        "training.early_stopping.max_num_checkpoint_not_improved",
        "training.keep_last_params",
        "training.device",
        "training.cuda_graphs",
        "training.threads",
        "training.log_interval",
        "parallel.pipeline",
        "parallel.shard_optimizer",
        "parallel.timeout",
    }
)
"""Keys that may differ when a run goes on: they change when it ends or how it runs, not what it learns."""


class Start(NamedTuple):
    """Starting point of a run: a saved state, or None for a new run.

    ``changes`` names keys that differ from the recipe it began with, ``with_changes`` says to go on all the same;
    ``notes`` is what a person should know about the state.
    """

    commit: Commit | None = None
    changes: tuple[str, ...] = ()
    with_changes: bool = False
    notes: tuple[str, ...] = ()


def find_start(recipe: Recipe, folder: ModelFolder, *, resume_with_changes: bool) -> Start:
    """Puts a folder in order and finds the state to go on from; a folder that is refused is left as it was.

    Raises:
        InputError: if the folder's run has another recipe and ``resume_with_changes`` does not say to go on, if none of
            its states can be read, or if it holds what is no run's to go on with (:meth:`ModelFolder.check`).
    """
    folder.check(overwrite=False, last=recipe.training.max_updates)
    changes = _changes(recipe, folder) if folder.commits() else []
    if changes and not resume_with_changes:
        raise InputError(
            f"{folder.path}: was trained with another recipe: {'; '.join(changes)}; go on all the same with "
            "--resume-with-changes, start anew with --overwrite-output, or give another output=DIR"
        )
    keep_best_state = recipe.training.schedule.name == "plateau-reduce"
    commit, notes = recover(folder, recipe.training.keep_last_params, keep_best_state)
    return Start(commit, tuple(changes), resume_with_changes, notes)


def _changes(recipe: Recipe, folder: ModelFolder) -> list[str]:
    """The keys that matter and differ from the recipe of the folder's run."""
    if not folder.recipe.is_file():
        raise InputError(
            f"{folder.path}: holds checkpoints but no recipe.yaml; put it back or start anew with --overwrite-output"
        )
    old = read_recipe(folder.recipe)
    free = FREE_KEYS | (keys_without_effect(old) & keys_without_effect(recipe))
    return [
        f"{key} {plain_text(before)} -> {plain_text(now)}"
        for key, before, now in differing_keys(old, recipe)
        if key not in free
    ]
