"""Decides whether a run may be resumed in a folder under a recipe, and from which state."""

from __future__ import annotations

from typing import NamedTuple

from econmt.checkpoint.folder import Commit, ModelFolder
from econmt.checkpoint.recovery import recover
from econmt.config.conditions import keys_without_effect
from econmt.config.marks import NO_PARAMETERS, marked_keys
from econmt.config.recipe import Recipe, differing_keys, read_recipe
from econmt.config.yaml_reader import plain_text
from econmt.errors import InputError


class Start(NamedTuple):
    """Start of a run: a saved state, or None to start anew.

    ``changes`` names keys that differ from the recipe that the run began with, ``with_changes`` is True if it may be
    resumed nevertheless, ``notes`` are messages about the state.
    """

    commit: Commit | None = None
    changes: tuple[str, ...] = ()
    with_changes: bool = False
    notes: tuple[str, ...] = ()


def find_start(recipe: Recipe, folder: ModelFolder, *, resume_with_changes: bool) -> Start:
    """Repairs a folder and finds the state to resume from; a refused folder is left unchanged.

    Raises:
        InputError: The folder's run has another recipe and ``resume_with_changes`` is False, none of its states is
            readable, or the folder holds other files (:meth:`ModelFolder.check`).
    """
    folder.check(overwrite=False, last=recipe.training.max_updates)
    changes = changed_keys(recipe, folder) if folder.commits() else []
    if changes and not resume_with_changes:
        raise InputError(
            f"{folder.path}: was trained with another recipe: {'; '.join(changes)}; resume nevertheless with "
            "--resume-with-changes, start anew with --overwrite-output, or use another output=DIR"
        )
    keep_best_state = recipe.training.schedule.name == "plateau-reduce"
    commit, notes = recover(folder, recipe.training.keep_last_params, keep_best_state)
    return Start(commit, tuple(changes), resume_with_changes, tuple(notes))


def changed_keys(recipe: Recipe, folder: ModelFolder) -> list[str]:
    """Returns the keys, with values, that differ from the recipe of the folder's run and matter for resuming it."""
    if not folder.recipe.is_file():
        raise InputError(
            f"{folder.path}: holds checkpoints but no recipe.yaml; restore it or start anew with --overwrite-output"
        )
    old = read_recipe(folder.recipe)
    free = marked_keys(Recipe, NO_PARAMETERS) | (keys_without_effect(old) & keys_without_effect(recipe))
    return [
        f"{key} {plain_text(before)} -> {plain_text(now)}"
        for key, before, now in differing_keys(old, recipe)
        if key not in free
    ]
