"""The model folder: paths of its files, the checks before a run writes to it, locking, and clearing."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from econmt.checkpoint.tensor_files import known_metadata
from econmt.config import limits
from econmt.config.recipe import parse_recipe, recipe_text
from econmt.data.batching.store import META_FILE
from econmt.data.files import refuse_pipe, remove
from econmt.errors import InputError

_PARAMETERS = re.compile(r"params\.([0-9]{1,15})\.safetensors")
_HYPOTHESES = re.compile(r"hypotheses\.([0-9]{1,15})")
_PENDING = ".new"
_PENDING_FILES = [re.compile(pattern.pattern + re.escape(_PENDING)) for pattern in (_PARAMETERS, _HYPOTHESES)]
_COMMITTED = re.compile(r"([0-9]{1,15})(\.interrupted)?")
_RUN_FILE = (
    r"(params\.([0-9]{1,15}|best)\.safetensors(\.new)?|hypotheses\.([0-9]{1,15}(\.new)?|test)|recipe\.yaml|metrics\.tsv|results\.json"
    r"|(subwords|vocab)(\.source|\.target|\.factor[0-9]+)?\.(model|txt))"
)
_UNFINISHED = re.compile(
    rf"\.{_RUN_FILE}\.\d+\.partial|params\.best\.safetensors\.tmp|\.ranks\.[0-9a-f]+\.tmp"
)
_UNFINISHED_STATE = re.compile(r"\d+(\.interrupted)?\.tmp")
_DAMAGED = re.compile(r"([0-9]{1,15})(\.interrupted)?\.damaged")
_STATE_FILES = {"state.json", "SHA256SUMS", "optimizer.safetensors", "params.safetensors"}
_PICTURES = ("learning_curve.png", "attention.png")
_EVENTS = "events.out.tfevents.*"


class Commit(NamedTuple):
    """A saved training state; at the same update, a checkpoint sorts after a state saved by an interruption."""

    update: int
    is_checkpoint: bool


class ModelFolder:
    """Files of one run; creating this object reads and writes nothing."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.metrics = self.path / "metrics.tsv"
        self.log = self.path / "log"
        self.results = self.path / "results.json"
        self.test_hypotheses = self.path / "hypotheses.test"
        self.best = self.path / "params.best.safetensors"
        self.states = self.path / "training_state"
        self.tensorboard = self.path / "tensorboard"
        self.pictures = self.path / "pictures"
        self.prepared = self.path / "prepared"
        for folder in (self.path, *_children(self.states), self.states):
            for path in _children(folder):
                if _is_run_file(path.name):
                    refuse_pipe(path)

    def parameters(self, update: int) -> Path:
        """Returns the path of a checkpoint's parameters."""
        return self.path / f"params.{update:05d}.safetensors"

    def hypotheses(self, update: int) -> Path:
        """Returns the path of a checkpoint's validation translations."""
        return self.path / f"hypotheses.{update:05d}"

    def state(self, commit: Commit) -> Path:
        """Returns the folder of a training state."""
        return self.states / f"{commit.update:05d}{'' if commit.is_checkpoint else '.interrupted'}"

    def commits(self) -> list[Commit]:
        """Returns all saved training states, oldest first, without unfinished ones that a crash left behind."""
        matches = _matching(self.states, _COMMITTED)
        return sorted(Commit(int(match[1]), match[2] is None) for path, match in matches if _is_state(path))

    def numbered_parameters(self) -> dict[int, Path]:
        """Returns the numbered parameter files by update."""
        return {int(match[1]): path for path, match in _matching(self.path, _PARAMETERS)}

    def numbered_hypotheses(self) -> dict[int, Path]:
        """Returns the files of validation translations by update."""
        return {int(match[1]): path for path, match in _matching(self.path, _HYPOTHESES)}

    def pending(self) -> dict[int, list[Path]]:
        """Returns, by update, the files of a checkpoint that is not yet committed; see :func:`pending`."""
        by_update: dict[int, list[Path]] = {}
        for pattern in _PENDING_FILES:
            for path, match in _matching(self.path, pattern):
                by_update.setdefault(int(match[1]), []).append(path)
        return by_update

    def damaged(self) -> dict[Path, int]:
        """Returns training states that were set aside because they are unreadable, with their updates."""
        return {path: int(match[1]) for path, match in _matching(self.states, _DAMAGED)}

    def temporaries(self) -> list[Path]:
        """Returns the files that econmt's unfinished writes left behind, but no other files with such suffixes."""
        states = [
            path
            for path, _ in _matching(self.states, _UNFINISHED_STATE)
            if all(each.name in _STATE_FILES or each.name.endswith(".partial") for each in _children(path))
        ]
        return [*(path for path, _ in _matching(self.path, _UNFINISHED)), *states]

    def check(self, *, overwrite: bool, last: int | None = None) -> None:
        """Checks that training would overwrite or delete only files of a run that it resumes.

        Training is allowed in a folder that is absent or empty but for prepared data, that holds a training state, that
        a run left before its first checkpoint, or, with ``overwrite``, that holds parameters of econmt. ``last`` is the
        update at which the run ends: files of later checkpoints are not overwritten.
        """
        if not self.path.is_dir():
            return
        commits = self.commits()
        if not commits:
            self._check_origin(overwrite=overwrite)
        self._check_kinds()
        if commits or overwrite:
            self._check_foreign_files(-1 if overwrite else commits[-1].update, last)

    def _check_origin(self, *, overwrite: bool) -> None:
        """Checks that a folder without training state comes from econmt and holds no parameters; see :meth:`check`."""
        parameters = [self.best, *self.numbered_parameters().values()]
        if not any(map(known_metadata, parameters)) and not self._is_begun():
            foreign = [path.name for path in _children(self.path) if not self._is_spare(path)]
            if foreign:
                more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
                raise InputError(
                    f"{self.path}: holds {', '.join(foreign[:3])}{more} and is no model folder of econmt; use another "
                    "output=DIR"
                )
        results = (*self.numbered_hypotheses().values(), self.metrics, self.results)
        leftovers = [path.name for path in (*parameters, *results) if path.exists()]
        if leftovers and not overwrite:
            raise InputError(
                f"{self.path}: holds {leftovers[0]} of an earlier run but no training state to resume; use another "
                f"output=DIR (training.initialize_from={self.path} uses these), or start anew "
                "with --overwrite-output, which deletes them"
            )

    def _check_kinds(self) -> None:
        """Refuses folders in place of files, files in place of folders, and links to files elsewhere."""
        for path in (self.states, self.pictures, self.tensorboard, self.prepared):
            if os.path.lexists(path) and not path.is_dir():
                raise InputError(f"{path}: training needs a folder of this name; move the file")
        for path in _children(self.states):
            if _COMMITTED.fullmatch(path.name) and not _is_state(path):
                raise InputError(f"{path}: has the name of a training state but is not one; move it")
        for path in _children(self.path):
            if path.is_dir() and _is_run_file(path.name):
                raise InputError(f"{path}: training needs a file of this name; move the folder")
            if path.is_symlink() and not path.is_dir() and _is_run_file(path.name):
                raise InputError(
                    f"{path}: a link to {path.readlink()}, which training would overwrite; remove the link, or use "
                    "another output=DIR"
                )

    def _check_foreign_files(self, newest: int, last: int | None) -> None:
        """Refuses files named like checkpoints after update ``newest`` that this folder's run did not write."""
        own_updates = self._written() | set(self.damaged().values())
        known = [self.numbered_parameters()]
        known += [self.numbered_hypotheses()] if self.metrics.exists() else []  # it tells who wrote them
        for files in known:
            for update, path in files.items():
                if update > newest and update not in own_updates and (last is None or update <= last):
                    raise InputError(
                        f"{path}: not written by the run in this folder, which would overwrite it; move it, or use "
                        "another output=DIR"
                    )

    def _written(self) -> set[int]:
        """Returns the updates whose checkpoints a run wrote, from metrics.tsv or the parameters' metadata."""
        written = _updates(self.metrics)
        if not self.commits():
            written |= {u for u, path in self.numbered_parameters().items() if known_metadata(path)}
        return written

    def check_writable(self) -> None:
        """Raises InputError if the folder can neither be created nor written to; creates nothing."""
        existing = self.path
        while not os.path.lexists(existing) and existing != existing.parent:
            existing = existing.parent
        with self._writing():
            tempfile.TemporaryFile(dir=existing).close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self.path}: the model folder cannot be written ({error.strerror}); use another output=DIR"
            ) from error

    def _is_begun(self) -> bool:
        """Returns True if a run has begun here: its folder of states exists, and the recipe is as a run writes it."""
        only_unfinished = all(_UNFINISHED_STATE.fullmatch(path.name) for path in _children(self.states))
        is_begun = self.states.is_dir() and only_unfinished
        return is_begun and (not self.recipe.exists() or _is_resolved(self.recipe))

    def _is_spare(self, path: Path) -> bool:
        """Returns True if a file may exist before a run begins: prepared data, or nothing of value."""
        if path == self.prepared:
            return path.is_dir() and ((path / META_FILE).is_file() or not any(path.iterdir()))
        if path == self.states:
            return path.is_dir() and not any(path.iterdir())
        return path.name == ".lock" or re.fullmatch(r"\.prepared\.\d+\.(partial|old)", path.name) is not None

    def create(self) -> None:
        """Creates the folder; raises InputError if it cannot be created or written to."""
        with self._writing():
            self.states.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()

    def clear(self) -> None:
        """Removes the files that training wrote, but not the prepared data and other files.

        States are removed first, the newest last, so that a crash in between leaves either the run or a folder without
        states.
        """
        commits = [self.state(commit) for commit in self.commits()]
        for state in (*self.damaged(), *commits, *self.temporaries()):
            remove(state)
        written = self._written()
        for files in (self.numbered_parameters(), self.numbered_hypotheses()):
            for update, path in files.items():
                if update in written:
                    path.unlink()
        for path in (
            *(path for paths in self.pending().values() for path in paths),
            self.best,
            self.metrics,
            self.log,
            self.results,
            self.test_hypotheses,
            self.recipe,
            *(self.pictures / name for name in _PICTURES),
            *self.tensorboard.glob(_EVENTS),
        ):
            path.unlink(missing_ok=True)
        for folder in (self.pictures, self.tensorboard):
            with suppress(OSError):  # absent, or holds other files
                folder.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder for this process, unless another trains in it; the lock ends however the process ends."""
        try:
            import fcntl
        except ImportError:  # Windows has no fcntl; there, users must avoid two runs in one folder
            yield
            return
        with (self.path / ".lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(
                    f"{self.path}: another process is training in this folder; wait for it or use another output=DIR"
                ) from error
            yield


def pending(path: Path) -> Path:
    """Returns the name of a checkpoint's file before the checkpoint is committed."""
    return path.with_name(path.name + _PENDING)


def _is_run_file(name: str) -> bool:
    """Returns True if a run reads or writes a file of this name in its folder."""
    return re.fullmatch(_RUN_FILE, name) is not None or name in (*_STATE_FILES, "log", ".lock")


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _matching(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    """Yields the files of a folder whose names match a pattern."""
    for path in _children(folder):
        if match := pattern.fullmatch(path.name):
            yield path, match


def _is_state(path: Path) -> bool:
    """Returns True if a folder holds a file of a training state, or is empty."""
    names = {child.name for child in _children(path)}
    return path.is_dir() and (not names or not names.isdisjoint(_STATE_FILES))


def _is_resolved(path: Path) -> bool:
    """Returns True if a recipe file is exactly what a run writes, so that it holds no comments of a user."""
    try:
        text = path.read_text(encoding="utf-8")
        return recipe_text(parse_recipe(text, str(path))) == text
    except (OSError, UnicodeDecodeError, InputError):
        return False


def _updates(metrics: Path) -> set[int]:
    """Returns the updates in metrics.tsv; empty if the file is missing or broken."""
    try:
        rows = metrics.read_text(encoding="utf-8").splitlines()[1:]
    except (OSError, UnicodeDecodeError):
        return set()
    first = (row.partition("\t")[0] for row in rows)
    return {number for number in map(limits.natural, first) if number is not None}
