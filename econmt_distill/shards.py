"""Translations of a text in shards: files of a fixed number of lines, each written whole or not at all."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from econmt.api import InputError, resolve_device
from econmt.api.commands import notice
from econmt.api.files import count_lines, read_lines, write_atomically
from econmt_distill.inputs import differences, read_inputs, take_inputs, write_record
from econmt_distill.opening import open_teacher
from econmt_distill.teachers import TeacherChoice

INPUTS_FILE = "inputs.json"
GPU_LINES, CPU_LINES = 32_768, 2_048
"""Default numbers of lines in a shard: half a minute to a few minutes of work."""
_SHARD_LINES = "--shard-lines"
_SAY_SECONDS = 0.5
"""Seconds between two reports of the progress."""


class Shards:
    """Folder of the translations of a text.

    Line n of a shard is the translation of line n of its part of the text or, if there are several translations of
    each line, a JSON list of them, best first.

    Attributes:
        folder: The folder. teacher: Who translates.
        lines: Number of lines of the text. size: Number of lines in a shard.
        digest: Checksum of everything that the translations depend on.
    """

    def __init__(
        self, folder: Path, teacher: TeacherChoice, source: Path, size: int | None, *, replace: bool = False
    ) -> None:
        """Checks that the folder's shards, if it has any, come from this teacher and text.

        Args:
            folder, teacher, source: See the class.
            size: Lines in a shard; None: those of the shards in the folder, or a number that suits the device.
            replace: True to delete shards that come from others.

        Raises:
            InputError: They come from others; the message names what differs.
        """
        self.folder, self.teacher, self._source = folder, teacher, source
        recorded = read_inputs(folder / INPUTS_FILE, folder)
        held = folder.is_dir() and any(
            path.name != INPUTS_FILE and not path.name.startswith(".") for path in folder.iterdir()
        )
        if size is None and recorded is not None:
            size = int(recorded.settings[_SHARD_LINES])
        self.size = size or _default_size(teacher)
        settings = {**teacher.settings, _SHARD_LINES: str(self.size)}
        inputs = take_inputs(settings, {"--source": source, **teacher.files}, recorded)
        changes = [] if recorded is None else differences(recorded, inputs)
        if replace and held and (changes or recorded is None):
            shutil.rmtree(folder)
        elif recorded is None and held:
            raise InputError(
                f"{folder}: holds translations without {INPUTS_FILE}, which says what they were made from; delete "
                f"{folder} to translate again"
            )
        elif changes and held:
            raise InputError(
                f"{folder}: holds translations made from other inputs: {'; '.join(changes)}; give the same, another "
                f"--output, or delete {folder} to translate again"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_record(folder / INPUTS_FILE, inputs)
        self.digest = inputs.digest
        lines = count_lines(source)
        if not lines:
            raise InputError(f"{source}: the file is empty or cannot be read; give text to translate")
        self.lines = lines

    def path(self, number: int) -> Path:
        """Returns the file of a shard."""
        return self.folder / f"{number:05d}.{'txt' if self.teacher.nbest_size == 1 else 'jsonl'}"

    def _length(self, number: int) -> int:
        return min(self.size, self.lines - number * self.size)

    def missing(self) -> list[int]:
        """Returns the numbers of the shards that are not complete."""
        numbers = range(-(-self.lines // self.size))
        return [number for number in numbers if count_lines(self.path(number)) != self._length(number)]

    def translate(self, say: Callable[[str], object]) -> None:
        """Translates the shards that are not complete; loads the teacher only if there are any.

        ``say`` is called with the progress and an estimate of the remaining time.
        """
        missing = self.missing()
        if not missing:
            return
        kept = len(range(-(-self.lines // self.size))) - len(missing)
        if kept:
            notice(f"{self.folder}: {kept:,} of {kept + len(missing):,} shards are complete and are kept")
        say(f"loading {self.teacher.name}")
        teacher = open_teacher(self.teacher)
        progress = _Estimate(sum(map(self._length, missing)), say)
        wanted = set(missing)
        for number, lines in enumerate(_chunks(self._source, self.size)):
            if number in wanted:
                first = number * self.size + 1
                lists = teacher.translate(lines, str(self._source), first, progress.done)
                rows = [
                    each[0] if self.teacher.nbest_size == 1 else json.dumps(each, ensure_ascii=False)
                    for each in lists
                ]
                write_atomically(self.path(number), "".join(f"{row}\n" for row in rows).encode())
        notice(f"translated {progress}")

    def __iter__(self) -> Iterator[tuple[str, list[str]]]:
        """Yields each line of the text with its translations, best first.

        Raises:
            InputError: A shard is damaged.
        """
        for number, lines in enumerate(_chunks(self._source, self.size)):
            rows = list(read_lines(self.path(number)))
            if len(rows) != len(lines):
                raise InputError(
                    f"{self.path(number)}: has {len(rows):,} lines instead of {len(lines):,}; delete it and run the "
                    "command again"
                )
            for row, line in enumerate(rows):
                yield lines[row], self._translations(line, self.path(number), row + 1)

    def _translations(self, row: str, path: Path, line: int) -> list[str]:
        if self.teacher.nbest_size == 1:
            return [row]
        try:
            texts = json.loads(row)
        except ValueError:
            texts = None
        if not (isinstance(texts, list) and texts and all(isinstance(each, str) for each in texts)):
            raise InputError(
                f"{path}:{line}: not a list of translations; delete the file and run the command again"
            )
        return texts


class _Estimate:
    """Number of translated lines, and the time that the rest will take at the mean speed so far."""

    def __init__(self, total: int, say: Callable[[str], object]) -> None:
        self._total, self._say, self._lines = total, say, 0
        self._began = self._said = time.monotonic()

    def done(self, lines: int) -> None:
        """Counts further lines and reports the progress from time to time."""
        self._lines += lines
        now = time.monotonic()
        if now - self._said < _SAY_SECONDS:
            return
        self._said, seconds = now, now - self._began
        left = ""
        if 0 < self._total <= 100 * self._lines:  # the first lines also wait for the teacher to start
            left = f", about {duration((self._total - self._lines) * seconds / self._lines)} left"
        self._say(f"translating: {self} of {self._total:,}{left}")

    def __str__(self) -> str:
        speed = self._lines / max(time.monotonic() - self._began, 1e-9)
        return f"{self._lines:,} lines ({speed:,.0f} a second)"


def duration(seconds: float) -> str:
    """Formats seconds for people: ``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def _default_size(teacher: TeacherChoice) -> int:
    on_gpu = teacher.command is None and resolve_device(teacher.device).type == "cuda"
    return GPU_LINES if on_gpu else CPU_LINES


def _chunks(path: Path, size: int) -> Iterator[Sequence[str]]:
    lines = read_lines(path)
    while chunk := list(islice(lines, size)):
        yield chunk
