"""Tiny trained models, and calls of the command line within this process."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from econmt.cli.main import main
from econmt.training.run import run_recipe
from tests.conftest import PATIENCE
from tests.unit.training.tiny import Run, write_text

SUBWORDS = (
    "data.subwords={type: bpe, size: 34}",
    "training.max_updates=12",
    "training.checkpoint_interval=6",
)


class Ended(NamedTuple):
    """What a call left behind."""

    code: int
    out: str
    err: str

    def succeeded(self) -> Ended:
        """This call, which must have ended well."""
        assert self.code == 0, self.err
        return self

    @property
    def lines(self) -> list[str]:
        """Lines of standard output."""
        assert self.out == "" or self.out.endswith("\n")
        return self.out.split("\n")[:-1]


Call = Callable[..., Ended]


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands see an idle, quick machine: on a busy one they warn, and tell what takes long, on standard error."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.0,) * 3, raising=False)
    monkeypatch.setattr("econmt.data.progress_bars.QUIET_SECONDS", PATIENCE)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Runs ``econmt`` with arguments and standard input."""
    return calling(main, capsys, monkeypatch, tmp_path)


def calling(
    program: Callable[[list[str]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Call:
    """Returns a function that calls a program within this process: with words of a shell, and further arguments."""

    def run(command: str = "", *arguments: object, text: str | bytes = "") -> Ended:
        words = [*shlex.split(command), *map(str, arguments)]
        given = tmp_path / "standard-input"
        given.write_bytes(text.encode() if isinstance(text, str) else text)
        capsys.readouterr()
        with given.open() as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stream)
            with pytest.raises(SystemExit) as end:
                program(words)
        captured = capsys.readouterr()
        return Ended(int(end.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train, valid and test, letters and their reverse in capitals."""
    return write_text(tmp_path_factory.mktemp("letters"), {"train": 60, "valid": 6, "test": 12})


@pytest.fixture(scope="session")
def word_model(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four checkpoints of a model over words, three of them with parameters."""
    run = Run(text, tmp_path_factory.mktemp("words") / "run", ("training.keep_last_params=3",))
    run_recipe(run.recipe, [text], console=run.console)
    return run.folder.path


@pytest.fixture
def copy(word_model: Path, tmp_path: Path) -> Path:
    """A copy of that folder, which a test may break."""
    return Path(shutil.copytree(word_model, tmp_path / "copy"))


@pytest.fixture(scope="session")
def subword_model(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model over joint SentencePiece subwords."""
    folder = tmp_path_factory.mktemp("subwords")
    run = Run(text, folder / "run", (*SUBWORDS, f"data.prepared={folder / 'prepared'}")).trained()
    return run.folder.path
