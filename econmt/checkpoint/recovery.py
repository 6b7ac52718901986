"""Clean-up that follows from the newest committed state, done after each commit and repeated after a crash."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from econmt.checkpoint.checkpoints import load_state, prove, publish
from econmt.checkpoint.folder import Commit, ModelFolder, remove
from econmt.checkpoint.state import TrainingState
from econmt.checkpoint.tensor_files import check_tensors, read_metadata, write_text
from econmt.data.files import sync_folder
from econmt.errors import InputError


class Recovered(NamedTuple):
    """The saved state to go on from, None if there is none, and what a person should know about it."""

    commit: Commit | None
    notes: tuple[str, ...] = ()


def finish_commit(folder: ModelFolder, state: TrainingState, keep_last: int, keep_best_state: bool) -> None:
    """Makes everything follow from the newest committed state: best parameters, metrics, and what is kept.

    The state of the checkpoint before is kept as well, with the parameters that going on from it needs. Only files of
    checkpoints of this run are removed.

    Args:
        folder: where.
        state: the newest committed state, which can be read.
        keep_last: how many of the newest parameter files are kept, beside the best.
        keep_best_state: whether the optimizer state of the best checkpoint is kept too.
    """
    if state.best_update:
        _follow_best(folder, state.best_update)
    if state.metrics:
        write_text(folder.metrics, state.metrics_text())
    commits = folder.commits()
    before = [commit for commit in commits[:-1] if commit.is_checkpoint][-1:]
    needed = [state]
    with suppress(InputError):  # it may be what is damaged
        needed += [load_state(folder, commit) for commit in before]
    states = {commits[-1], *before}
    if keep_best_state:
        states |= {Commit(each.best_update, True) for each in needed}
    for commit in commits:
        if commit not in states:
            _remove_state(folder.state(commit))
    for path, update in folder.damaged().items():
        if update <= state.update:
            remove(path)
    checkpoints = [int(row["update"]) for row in state.metrics]
    kept = {*checkpoints[-keep_last:]}
    for each in needed:
        kept |= {each.best_update, each.parameters_from}
    for update in checkpoints:
        if update not in kept:
            folder.parameters(update).unlink(missing_ok=True)
            folder.hypotheses(update).unlink(missing_ok=True)


def recover(folder: ModelFolder, keep_last: int, keep_best_state: bool) -> Recovered:
    """Puts the folder in order after a crash at any moment, and finds the newest saved state that can be read.

    States that cannot be read are set aside if an earlier one can.

    Raises:
        InputError: if there are states, but none that can be read; the folder is as it was.
    """
    for path in folder.temporaries():
        remove(path)
    commits = folder.commits()
    newest = commits[-1].update if commits and commits[-1].is_checkpoint else None
    for update, paths in folder.pending().items():
        if update == newest:
            publish(folder, update)
        else:
            for path in paths:
                path.unlink()
    if not commits:
        return Recovered(None)
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
            notes.append(f"the best checkpoint so far is lost, a better one will take its place: {error}")
    return Recovered(commit, tuple(notes))


def _newest_readable(folder: ModelFolder, commits: list[Commit]) -> tuple[Commit, list[str]]:
    notes: list[str] = []
    first: InputError | None = None
    for commit in reversed(commits):
        try:
            prove(folder, commit)
        except InputError as error:
            first = first or error
            notes.append(f"the state of update {commit.update} cannot be used: {error}")
        else:
            if notes:
                notes.append(f"going back to the state before, of update {commit.update}")
            return commit, notes
    assert first is not None
    raise first


def _remove_state(path: Path) -> None:
    # Renamed first, so that a crash never leaves half a state under a good name.
    going = path.with_name(path.name + ".tmp")
    remove(going)
    path.rename(going)
    remove(going)


def _follow_best(folder: ModelFolder, update: int) -> None:
    """Lets both names of the best checkpoint's parameters mean one content; one that is lost is made from the other."""
    numbered = _head(folder.parameters(update))
    best = _head(folder.best)
    if numbered is not None and numbered != best:
        _link(folder.parameters(update), folder.best)
    elif numbered is None and best is not None and best.get("update") == str(update):
        _link(folder.best, folder.parameters(update))


def _head(path: Path) -> dict[str, str] | None:
    """The metadata of a parameter file, which has its checksum; None if it has none to be read."""
    try:
        return read_metadata(path)
    except InputError:
        return None


def _link(source: Path, link: Path) -> None:
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
    temporary.replace(link)
    sync_folder(link.parent)
