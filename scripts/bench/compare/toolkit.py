"""What every compared toolkit has: an environment of its own, commands, and a log that can be read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from .measure import FailedError, Reading

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LAUNCHERS = HERE / "launchers"
REQUIREMENTS = HERE / "requirements"
SOURCE, TARGET = "en", "de"
LOG_EVERY = 10
"""Updates between two lines of every training log."""
BATCH = 64
EMBEDDING = HIDDEN = ATTENTION = 512
LEARNING_RATE = 1.0e-3
CLIP_NORM = 1.0
BEAM = 5
LONGEST_OUTPUT = 100
TRUSTED_MODELS = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
"""Lets a toolkit older than torch 2.6 load the models that it saved itself, which hold pickled objects."""
_COUNTED = re.compile(r"update (\d+): (\d+) target tokens\b")


class Places(NamedTuple):
    """Where things are.

    Attributes:
        data: the token files, see ``make_data``.
        work: a folder of the toolkit's own.
        interpreter: the Python of its environment.
    """

    data: Path
    work: Path
    interpreter: Path

    def tokens(self, split: str, side: str) -> Path:
        """The file of space-separated pieces of a split (train, valid, test) and language."""
        return self.data / f"{split}.{side}"


class Command(NamedTuple):
    """A command line, and the file that it reads as standard input, if any."""

    words: list[str]
    standard_input: Path | None = None


class Toolkit(ABC):
    """One row of the table."""

    name: ClassVar[str]
    package: ClassVar[str]
    """Distribution whose version is reported; also the name of its file of requirements."""
    python: ClassVar[str] = "3.11"
    build_first: ClassVar[tuple[str, ...]] = ()
    """Requirements installed before the others, to build ``build_without_isolation``."""
    build_without_isolation: ClassVar[str | None] = None
    differs: ClassVar[str]
    """What is not the same as in econmt, for the table's notes."""
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """Where it can run as it is installed here."""
    device: str = "cpu"
    """Where it runs."""

    @property
    def environment_name(self) -> str:
        """Toolkits with the same name share an environment."""
        return self.package.lower()

    @property
    def requirements(self) -> Path | None:
        """The pinned packages of its environment; None if it runs in this process's environment."""
        return REQUIREMENTS / f"{self.environment_name}.txt"

    def version(self) -> str:
        """The pinned version of its package."""
        assert self.requirements is not None
        for line in self.requirements.read_text(encoding="utf-8").splitlines():
            name, _, version = line.partition("==")
            if name.lower() == self.package.lower():
                return version
        raise ValueError(f"{self.requirements} has no {self.package}")

    def variables(self) -> dict[str, str]:
        """Environment variables that it needs."""
        return {}

    @abstractmethod
    def prepare(self, places: Places) -> list[Command]:
        """Write configurations into ``places.work`` and return commands to run before training."""

    @abstractmethod
    def train(self, places: Places, model: Path, updates: int) -> Command:
        """Train for ``updates`` updates and save a model into the folder ``model``."""

    @abstractmethod
    def translate(self, places: Places, model: Path, output: Path) -> Command:
        """Translate the test sentences with beam search; ``output`` is for toolkits that write a file."""

    def reading(self, line: str) -> Reading | None:
        """What a line of the training log says of the tokens; None if nothing.

        Toolkits that do not count them in their log are started by one of ``launchers/``, which prints the counts.
        """
        found = _COUNTED.match(line)
        return Reading(int(found[1]), float(found[2])) if found else None

    @abstractmethod
    def translation_seconds(self, line: str) -> float | None:
        """Seconds of translation, start-up excluded, if the line says them."""

    def output_lines(self, printed: Sequence[str], output: Path) -> list[str]:  # noqa: ARG002
        """The translations, in whatever order; what the command printed is given too."""
        return output.read_text(encoding="utf-8").splitlines()


def find_interpreter(version: str, given: str | None) -> Path:
    """An interpreter of a Python version such as 3.6: the one given, on the PATH, or installed by pyenv.

    Raises:
        FailedError: there is none.
    """
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = shutil.which(f"python{version}")
    candidates = (
        [Path(given)]
        if given
        else [
            *([Path(found)] if found else []),
            *sorted(home.glob(f"versions/{version}.*/bin/python")),
        ]
    )
    for candidate in candidates:
        gate_gradient = [str(candidate), "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(gate_gradient, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return candidate
    raise FailedError(f"no Python {version} with the venv module; give one with --python {version}=PATH")


def install(toolkit: Toolkit, folder: Path, given: str | None) -> Path:
    """Make the toolkit's environment in ``folder`` unless it is there, and return its interpreter.

    Every package is pinned and installed without its dependencies, so that nothing else comes along.

    Raises:
        FailedError: a step failed; the message has the end of what it printed.
    """
    place = folder / toolkit.environment_name
    interpreter, mark = place / "bin" / "python", place / "installed.txt"
    assert toolkit.requirements is not None
    wanted = toolkit.requirements.read_text(encoding="utf-8")
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        return interpreter
    shutil.rmtree(place, ignore_errors=True)
    base = find_interpreter(toolkit.python, given)
    place.parent.mkdir(parents=True, exist_ok=True)
    _step([str(base), "-m", "venv", str(place)])
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--no-deps"]
    # Python 3.6 brings one too old for today's wheels; one newer than 24.0 refuses what fairseq asks for.
    _step([*pip, f"pip=={'21.3.1' if toolkit.python == '3.6' else '24.0'}"])
    lines = wanted.splitlines()
    if toolkit.build_without_isolation is not None:
        early = [line for line in lines if line.split("==")[0].lower() in toolkit.build_first]
        _step([*pip, *early])
        _step([*pip, "--no-build-isolation", toolkit.build_without_isolation])
    _step([*pip, *(line for line in lines if line != toolkit.build_without_isolation)])
    mark.write_text(wanted, encoding="utf-8")
    return interpreter


def _step(command: list[str]) -> None:
    answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if answer.returncode != 0:
        end = "\n  ".join(answer.stdout.splitlines()[-15:])
        raise FailedError(f"{' '.join(command)}\nended with status {answer.returncode}:\n  {end}")
