"""Base class of the compared toolkits: their environments, commands and logs, and the sizes that they share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from .measure import FailedError, Reading

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LAUNCHER = HERE / "launchers" / "start.py"
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
_COUNTED = re.compile(r"update (\d+): (\d+) target tokens\b")


class Places(NamedTuple):
    """Paths of one toolkit.

    Attributes:
        data: Folder of the token files, see ``make_data``.
        work: Folder that only this toolkit writes.
        interpreter: Python of its environment.
    """

    data: Path
    work: Path
    interpreter: Path

    def tokens(self, split: str, side: str) -> Path:
        """Returns the file of space-separated pieces of a split (train, valid, test) and language."""
        return self.data / f"{split}.{side}"


class Command(NamedTuple):
    """Command line, and the file that it reads as standard input, if any."""

    words: list[str]
    standard_input: Path | None = None

    @classmethod
    def python(cls, places: Places, *words: object, standard_input: Path | None = None) -> Command:
        """Runs the Python of a toolkit's environment."""
        return cls([str(places.interpreter), *map(str, words)], standard_input)


class Toolkit(ABC):
    """Toolkit of one row of the table.

    Args:
        precision: Precision of its products in place of its own.
    """

    name: str
    package: ClassVar[str]
    """Distribution whose version is reported; also the name of its environment and file of requirements."""
    precision: str = "float32"
    """Precision of its products in training; "auto" if it chooses."""
    device: str = "cpu"
    """Device that it uses."""
    loads_pickles: ClassVar[bool] = False
    """True if it loads models that hold pickled objects, which torch refuses since 2.6 unless it is told."""
    translated: ClassVar[re.Pattern[str]]
    """Line of its log with the seconds of translation, start-up excluded."""

    def __init__(self, precision: str = "") -> None:
        if precision:
            self.precision, self.name = precision, f"{self.name}, {precision}"

    @property
    def requirements(self) -> Path | None:
        """File of the pinned packages of its environment; None if it uses this process's environment."""
        return REQUIREMENTS / f"{self.package.lower()}.txt"

    def version(self) -> str:
        """Returns the pinned version of its package."""
        assert self.requirements is not None
        for line in self.requirements.read_text(encoding="utf-8").splitlines():
            name, _, version = line.partition("==")
            if name.lower() == self.package.lower():
                return version
        raise ValueError(f"{self.requirements} has no {self.package}")

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that it needs."""
        return {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"} if self.loads_pickles else {}

    def prepare(self, places: Places) -> list[Command]:  # noqa: ARG002
        """Writes configurations into ``places.work``; returns commands to run before training."""
        return []

    @abstractmethod
    def train(self, places: Places, model: Path, updates: int) -> Command:
        """Returns the command that trains for ``updates`` updates and saves a model into the folder ``model``."""

    @abstractmethod
    def translate(self, places: Places, model: Path, output: Path) -> Command:
        """Returns the command that translates the test text; ``output`` is for toolkits that write a file."""

    def reading(self, line: str) -> Reading | None:
        """Returns the tokens that a line of the training log reports; None if it reports none.

        Toolkits without such lines are started by a script of ``launchers/``, which prints them.
        """
        found = _COUNTED.match(line)
        return Reading(int(found[1]), float(found[2])) if found else None

    def translation_seconds(self, line: str) -> float | None:
        """Returns the seconds of translation that a line reports; None if it reports none."""
        found = self.translated.search(line)
        return float(found[1]) if found else None

    def output_lines(self, printed: Sequence[str], output: Path) -> list[str]:  # noqa: ARG002
        """Returns the translations in the order of the text, from the lines that were printed or the output file."""
        return output.read_text(encoding="utf-8").splitlines()


def find_environment(toolkit: Toolkit, folder: Path) -> Path:
    """Returns the interpreter of the toolkit's environment in a folder of environments.

    Raises:
        FailedError: There is none.
    """
    interpreter = folder.resolve() / toolkit.package.lower() / "bin" / "python"
    if not interpreter.exists():
        raise FailedError(f"no {interpreter}; {HERE / 'README.md'} says how to make the environment")
    return interpreter
