"""The model folder: which file is where, who may write to it, and how it is emptied."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from econmt.checkpoint.tensor_files import read_metadata
from econmt.config.recipe import parse_recipe, recipe_text
from econmt.data.batching.store import META_FILE
from econmt.data.files import refuse_pipe
from econmt.errors import InputError

_PARAMETERS = re.compile(r"params\.([0-9]{1,15})\.safetensors")
_HYPOTHESES = re.compile(r"hypotheses\.([0-9]{1,15})")
_COMMITTED = re.compile(r"([0-9]{1,15})(\.interrupted)?")
_OWN_NAME = (
    r"(params\.([0-9]{1,15}|best)\.safetensors(\.new)?|hypotheses\.([0-9]{1,15}(\.new)?|test)|recipe\.yaml|metrics\.tsv|results\.json"
    r"|(subwords|vocab)(\.source|\.target|\.factor[0-9]+)?\.(model|txt))"
)
_UNFINISHED = re.compile(
    rf"\.{_OWN_NAME}\.\d+\.partial|params\.best\.safetensors\.tmp|\.ranks\.[0-9a-f]+\.tmp"
)
_UNFINISHED_STATE = re.compile(r"\d+(\.interrupted)?\.tmp")
_DAMAGED = re.compile(r"([0-9]{1,15})(\.interrupted)?\.damaged")
_STATE_FILES = {"state.json", "SHA256SUMS", "optimizer.safetensors", "params.safetensors"}
_PICTURES = ("learning_curve.png", "attention.png")
_PENDING = ".new"
_EVENTS = "events.out.tfevents.*"


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
        for folder in (self.path, *_children(self.states), self.states):
            for path in _children(folder):
                if _is_own_name(path.name):
                    refuse_pipe(path)

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
            if match and _is_state(path):
                found.append(Commit(int(match[1]), match[2] is None))
        return sorted(found)

    def numbered_parameters(self) -> dict[int, Path]:
        """Parameter files by update."""
        return _numbered(self.path, _PARAMETERS)

    def numbered_hypotheses(self) -> dict[int, Path]:
        """Files of validation translations by update."""
        return _numbered(self.path, _HYPOTHESES)

    def pending(self) -> dict[int, list[Path]]:
        """By update, the files of a checkpoint that await its commit; see :func:`pending`."""
        found: dict[int, list[Path]] = {}
        for pattern in (_PARAMETERS, _HYPOTHESES):
            for path in _children(self.path):
                match = pattern.fullmatch(path.name.removesuffix(_PENDING))
                if match and path.name.endswith(_PENDING):
                    found.setdefault(int(match[1]), []).append(path)
        return found

    def damaged(self) -> dict[Path, int]:
        """Training states that were set aside because they cannot be read, and their updates."""
        found = ((_DAMAGED.fullmatch(path.name), path) for path in _children(self.states))
        return {path: int(match[1]) for match, path in found if match}

    def temporaries(self) -> list[Path]:
        """Files that an unfinished write of econmt left behind; other files with such a suffix are not econmt's."""
        return [
            *(path for path in _children(self.path) if _UNFINISHED.fullmatch(path.name)),
            *(path for path in _children(self.states) if _is_unfinished_state(path)),
        ]

    def check(self, *, overwrite: bool, last: int | None = None) -> None:
        """Refuses a folder in which training would overwrite or delete what is not a run's to go on with.

        A folder may be trained in if it is absent, or empty but for prepared data; if it holds a training state; if a
        run that had not come to its first checkpoint left it; or, with ``overwrite``, if it holds parameters of econmt.
        ``last`` is the update at which the run ends: what is named like a later checkpoint is not written over.

        Raises:
            InputError: naming the folder and what it holds.
        """
        if not self.path.is_dir():
            return
        commits = self.commits()
        if not commits:
            self._check_origin(overwrite=overwrite)
        self._check_kinds()
        if commits or overwrite:
            self._check_strangers(-1 if overwrite else commits[-1].update, last)

    def _check_origin(self, *, overwrite: bool) -> None:
        """Refuses a folder without a training state that is none of econmt's, or has parameters; see :meth:`check`."""
        parameters = [self.best, *self.numbered_parameters().values()]
        if not any(map(_is_of_econmt, parameters)) and not self._is_begun():
            foreign = [path.name for path in _children(self.path) if not self._is_spare(path)]
            if foreign:
                more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
                raise InputError(
                    f"{self.path}: holds {', '.join(foreign[:3])}{more} and is no model folder of econmt; give another "
                    "output=DIR"
                )
        results = (*self.numbered_hypotheses().values(), self.metrics, self.results)
        left = [path.name for path in (*parameters, *results) if path.exists()]
        if left and not overwrite:
            raise InputError(
                f"{self.path}: holds {left[0]} of an earlier run but no training state to go on from; give another "
                f"output=DIR (there training.initialize_from={self.path} begins with these parameters), or start anew "
                "with --overwrite-output, which deletes them"
            )

    def _check_kinds(self) -> None:
        """Refuses folders in place of files, files in place of folders, and links to files of other places."""
        for path in (self.states, self.pictures, self.tensorboard, self.prepared):
            if os.path.lexists(path) and not path.is_dir():
                raise InputError(f"{path}: training needs a folder of this name; move what is there")
        for path in _children(self.states):
            if _COMMITTED.fullmatch(path.name) and not _is_state(path):
                raise InputError(f"{path}: has the name of a training state and is none; move it")
        for path in _children(self.path):
            if path.is_dir() and _is_own_name(path.name):
                raise InputError(f"{path}: training needs a file of this name; move the folder")
            if path.is_symlink() and not path.is_dir() and _is_own_name(path.name):
                raise InputError(
                    f"{path}: a link to {path.readlink()}, which training would write over; remove the link, or give "
                    "another output=DIR"
                )

    def _check_strangers(self, newest: int, last: int | None) -> None:
        """Refuses files named like a checkpoint to come, after the update ``newest``, that no run here wrote."""
        own = self._written() | set(self.damaged().values())
        known = [self.numbered_parameters()]
        known += [self.numbered_hypotheses()] if self.metrics.exists() else []  # it tells whose they are
        for files in known:
            for update, path in files.items():
                if update > newest and update not in own and (last is None or update <= last):
                    raise InputError(
                        f"{path}: not written by the run in this folder, which would write over it; move it, or give "
                        "another output=DIR"
                    )

    def _written(self) -> set[int]:
        """Updates whose checkpoints a run wrote: metrics.tsv has them, or the parameters are of econmt."""
        written = _updates(self.metrics)
        if not self.commits():
            written |= {u for u, path in self.numbered_parameters().items() if _is_of_econmt(path)}
        return written

    def check_writable(self) -> None:
        """Refuses a folder that could not be made or written to, and makes nothing.

        Raises:
            InputError: naming it and why.
        """
        place = self.path
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        try:
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"{self.path}: the model folder cannot be written ({error.strerror}); give another output=DIR"
        )

    def _is_begun(self) -> bool:
        """Returns True if a run has begun here: it has a folder of states and a recipe without comments."""
        states = _children(self.states)
        own = all(_UNFINISHED_STATE.fullmatch(path.name) for path in states)
        return self.states.is_dir() and own and (not self.recipe.exists() or _is_resolved(self.recipe))

    def _is_spare(self, path: Path) -> bool:
        """Returns True if a file may exist before a run begins: prepared data, or something that cannot be lost."""
        if path == self.prepared:
            return path.is_dir() and ((path / META_FILE).is_file() or not any(path.iterdir()))
        if path == self.states:
            return path.is_dir() and not any(path.iterdir())
        return path.name == ".lock" or re.fullmatch(r"\.prepared\.\d+\.(partial|old)", path.name) is not None

    def create(self) -> None:
        """Makes the folder.

        Raises:
            InputError: if it cannot be made or written to.
        """
        try:
            self.states.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()
        except OSError as error:
            raise self._unwritable(error) from error

    def clear(self) -> None:
        """Removes what training wrote, the prepared data aside; other files in the folder stay.

        The states go first, the newest last, so that a crash in between leaves the run or a folder without one.
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
            with suppress(OSError):  # it is absent, or holds other files
                folder.rmdir()

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


def pending(path: Path) -> Path:
    """Returns the temporary path of a checkpoint's file until the checkpoint is committed."""
    return path.with_name(path.name + _PENDING)


def remove(path: Path) -> None:
    """Removes a file or a folder with all in it; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_own_name(name: str) -> bool:
    """Returns True if a run writes or reads a file of this name in its folder."""
    return re.fullmatch(_OWN_NAME, name) is not None or name in (*_STATE_FILES, "log", ".lock")


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found = ((pattern.fullmatch(path.name), path) for path in _children(folder))
    return {int(match[1]): path for match, path in found if match}


def _is_state(path: Path) -> bool:
    """Returns True if a folder holds a file of a training state or is empty, unlike a user's folder of that name."""
    names = {child.name for child in _children(path)}
    return path.is_dir() and (not names or not names.isdisjoint(_STATE_FILES))


def _is_unfinished_state(path: Path) -> bool:
    """Returns True if a folder has the name of an unfinished state and holds only files of a state."""
    names = {child.name for child in _children(path)}
    ours = all(name in _STATE_FILES or name.endswith(".partial") for name in names)
    return ours and _UNFINISHED_STATE.fullmatch(path.name) is not None


def _is_of_econmt(path: Path) -> bool:
    """Returns True if there is a parameter file that econmt wrote."""
    try:
        return bool(read_metadata(path))
    except InputError:
        return False


def _is_resolved(path: Path) -> bool:
    """Returns True if a recipe is exactly as a run writes it, without a user's comments."""
    try:
        text = path.read_text(encoding="utf-8")
        return recipe_text(parse_recipe(text, str(path))) == text
    except (OSError, UnicodeDecodeError, InputError):
        return False


def _updates(metrics: Path) -> set[int]:
    """The updates in the first column of a metrics.tsv; none if there is no such file or it is broken."""
    try:
        rows = metrics.read_text(encoding="utf-8").splitlines()[1:]
    except (OSError, UnicodeDecodeError):
        return set()
    first = (row.partition("\t")[0] for row in rows)
    return {int(update) for update in first if update.isdecimal()}
