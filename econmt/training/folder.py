"""The model folder: which file is where, who may write to it, and how it is emptied."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from econmt.data.files import sync_folder
from econmt.errors import InputError

_PARAMETERS = re.compile(r"params\.(\d+)\.safetensors")
_HYPOTHESES = re.compile(r"hypotheses\.(\d+)")
_COMMITTED = re.compile(r"(\d+)(\.interrupted)?")


class Commit(NamedTuple):
    """A saved training state. A checkpoint comes after a state saved by an interruption at the same update."""

    update: int
    is_checkpoint: bool


class ModelFolder:
    """The files of one run; nothing is read or written by making one of these."""

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

    def parameters(self, update: int) -> Path:
        """The parameters of a checkpoint."""
        return self.path / f"params.{update:05d}.safetensors"

    def hypotheses(self, update: int) -> Path:
        """The validation translations of a checkpoint."""
        return self.path / f"hypotheses.{update:05d}"

    def state(self, commit: Commit) -> Path:
        """The folder of a training state."""
        return self.states / f"{commit.update:05d}{'' if commit.is_checkpoint else '.interrupted'}"

    def commits(self) -> list[Commit]:
        """All saved training states, oldest first; what a crash left behind under a temporary name is none."""
        found = []
        for path in _children(self.states):
            match = _COMMITTED.fullmatch(path.name)
            if match and path.is_dir():
                found.append(Commit(int(match[1]), match[2] is None))
        return sorted(found)

    def numbered_parameters(self) -> dict[int, Path]:
        """Parameter files by update."""
        return _numbered(self.path, _PARAMETERS)

    def numbered_hypotheses(self) -> dict[int, Path]:
        """Files of validation translations by update."""
        return _numbered(self.path, _HYPOTHESES)

    def temporaries(self) -> list[Path]:
        """What an unfinished write left behind."""
        folders = (self.path, self.states)
        return [
            path
            for folder in folders
            for path in _children(folder)
            if path.name.endswith((".tmp", ".partial"))
        ]

    def create(self) -> None:
        """Makes the folder.

        Raises:
            InputError: if it cannot be made or written to.
        """
        try:
            self.states.mkdir(parents=True, exist_ok=True)
            probe = self.path / "probe.tmp"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"{self.path}: the model folder cannot be written ({error.strerror}); give another output=DIR"
            ) from error

    def clear(self) -> None:
        """Removes what training wrote, the prepared data aside.

        The training states go first and in one step, so that a crash in between leaves a folder without a run.
        """
        if self.states.exists():
            going = self.path / "training_state.tmp"
            shutil.rmtree(going, ignore_errors=True)
            self.states.rename(going)
            sync_folder(self.path)
        numbered = [*self.numbered_parameters().values(), *self.numbered_hypotheses().values()]
        for path in (
            *numbered,
            self.best,
            self.metrics,
            self.log,
            self.results,
            self.test_hypotheses,
            self.recipe,
        ):
            path.unlink(missing_ok=True)
        for path in (self.tensorboard, self.pictures, *self.temporaries()):
            remove(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder for this process; the system lets go of it however the process ends.

        Raises:
            InputError: if another process trains in it.
        """
        try:
            import fcntl
        except ImportError:  # Windows has no fcntl; there two runs in one folder are the user's care
            yield
            return
        with (self.path / ".lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(
                    f"{self.path}: another process is training in this folder; wait for it or give another output=DIR"
                ) from error
            yield


def remove(path: Path) -> None:
    """Removes a file or a folder with all in it; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found = ((pattern.fullmatch(path.name), path) for path in _children(folder))
    return {int(match[1]): path for match, path in found if match}
