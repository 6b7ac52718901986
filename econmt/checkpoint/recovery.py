"""Finds the state that a run may resume from, and brings a model folder in line with its newest committed state."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from econmt.checkpoint.checkpoints import load_state, prove, remove_unfinished
from econmt.checkpoint.folder import Commit, ModelFolder
from econmt.checkpoint.state import TrainingState
from econmt.checkpoint.tensor_files import check_tensors, known_metadata, write_text
from econmt.config.conditions import keys_without_effect
from econmt.config.recipe import Recipe, differing_keys, read_recipe
from econmt.config.section import NO_PARAMETERS, marked_keys
from econmt.config.yaml_reader import plain_text
from econmt.data.files import remove, sync_folder
from econmt.errors import InputError


def finish_commit(folder: ModelFolder, state: TrainingState, keep_last: int, keep_best_state: bool) -> None:
    """Updates best parameters and metrics after a commit, and removes files that are no longer needed.

    The state of the previous checkpoint is kept too, with the parameters that resuming from it needs. Only files of
    this run's checkpoints are removed.

    Args:
        folder: Model folder. state: Newest committed state, which is readable.
        keep_last: Number of the newest parameter files to keep, in addition to the best.
        keep_best_state: True if the best checkpoint at the interval is kept too, with its optimizer state.
    """
    if state.best_update:
        _link_best(folder, state.best_update)
    if state.metrics:
        write_text(folder.metrics, state.metrics_text())
    commits = folder.commits()
    before = [commit for commit in commits[:-1] if commit.is_checkpoint][-1:]
    needed = [state]
    with suppress(InputError):  # this state may be the damaged one
        needed += [load_state(folder, commit) for commit in before]
    states = {commits[-1], *before}
    if keep_best_state:
        states |= {Commit(kept_state.best_regular, True) for kept_state in needed}
    for commit in commits:
        if commit not in states:
            path = folder.state(commit)
            removed = path.with_name(path.name + ".tmp")
            remove(removed)
            path.rename(removed)  # first, so that a crash never leaves half a state under a valid name
            remove(removed)
    for path, update in folder.damaged().items():
        if update <= state.update:
            remove(path)
    checkpoints = [int(row["update"]) for row in state.metrics]
    kept = {*checkpoints[-keep_last:]}
    for kept_state in needed:
        kept |= {kept_state.best_update, kept_state.parameters_from}
        kept |= {kept_state.best_regular} if keep_best_state else set()
    for update in checkpoints:
        if update not in kept:
            folder.parameters(update).unlink(missing_ok=True)
            folder.hypotheses(update).unlink(missing_ok=True)


def recover(folder: ModelFolder, keep_last: int, keep_best_state: bool) -> tuple[Commit | None, list[str]]:
    """Repairs the folder after a crash at any moment, and finds the newest readable state, with messages about it.

    Unreadable states are set aside if an earlier one is readable. If none is, the folder of states stays unchanged, and
    InputError is raised.
    """
    remove_unfinished(folder)
    commits = folder.commits()
    if not commits:
        return None, []
    commit, notes = _newest_readable(folder, commits)
    for bad in commits[commits.index(commit) + 1 :]:
        aside = folder.state(bad).with_name(folder.state(bad).name + ".damaged")
        remove(aside)
        folder.state(bad).rename(aside)
    state = load_state(folder, commit)
    finish_commit(folder, state, keep_last, keep_best_state)
    if state.best_update:
        try:
            check_tensors(folder.best)
        except InputError as error:
            notes.append(f"the best checkpoint so far is lost; the next better one replaces it: {error}")
    return commit, notes


def _newest_readable(folder: ModelFolder, commits: list[Commit]) -> tuple[Commit, list[str]]:
    notes: list[str] = []
    errors: list[InputError] = []
    for commit in reversed(commits):
        try:
            prove(folder, commit)
        except InputError as error:
            errors.append(error)
            notes.append(f"the state of update {commit.update} cannot be used: {error}")
        else:
            if notes:
                notes.append(f"using the previous state instead, of update {commit.update}")
            return commit, notes
    raise errors[0]


def _link_best(folder: ModelFolder, update: int) -> None:
    """Hard-links the best checkpoint's two file names to one content, and restores a missing one from the other."""
    numbered, best = known_metadata(folder.parameters(update)), known_metadata(folder.best)
    if numbered and numbered != best:
        _link(folder.parameters(update), folder.best)
    elif not numbered and best.get("update") == str(update):
        _link(folder.best, folder.parameters(update))


def _link(source: Path, link: Path) -> None:
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
    temporary.replace(link)
    sync_folder(link.parent)


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
