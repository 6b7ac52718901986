"""Speed of a teacher or a student on one core, measured in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import econmt_runtime
from econmt.api import EconmtError
from econmt.api.programs import ProgramError, start_program
from econmt_distill.opening import open_teacher
from econmt_distill.teachers import TeacherChoice

WARM_UP = 32
"""Lines translated before the time is taken."""

ROUNDS = 2
"""Number of times that the lines are translated; the fastest counts."""

_COMMAND = [sys.executable, "-m", "econmt_distill.timing"]


class TimedTranslations(NamedTuple):
    """Translations of some lines, and the processor time that they took, in seconds, without loading the model."""

    texts: list[str]
    seconds: float

    @property
    def words_per_second(self) -> float:
        """Space-separated words of the translations per second of processor time."""
        return sum(len(text.split()) for text in self.texts) / max(self.seconds, 1e-9)


def timed(model: TeacherChoice | Path, lines: Sequence[str]) -> TimedTranslations:
    """Translates lines on the CPU with one thread.

    Args:
        model: Teacher, or runtime folder. lines: Lines to translate.

    Raises:
        EconmtError: The lines cannot be translated.
    """
    if isinstance(model, TeacherChoice):
        choice = asdict(replace(model, device="cpu", threads=1))
        chosen = {name: str(value) if isinstance(value, Path) else value for name, value in choice.items()}
        task: dict[str, object] = {"teacher": chosen}
    else:
        task = {"runtime": str(model)}
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**single, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    text = [json.dumps({**task, "lines": list(lines)})]
    name = model if isinstance(model, Path) else model.name
    try:
        with start_program(_COMMAND, text, environment, keep_errors=True) as process:
            result = b"".join(process.output())
    except ProgramError as error:
        raise EconmtError(f"{name}: cannot be timed: the process that measures {error}") from None
    if process.code:
        said = process.complaint or f"exit code {process.code}"
        raise EconmtError(f"{name}: cannot be timed: {said}")
    return TimedTranslations(**json.loads(result))


def _translator(task: dict[str, object]) -> Callable[[list[str]], list[str]]:
    if "runtime" in task:
        runtime = econmt_runtime.load(str(task["runtime"]), threads=1)
        return lambda lines: [each.text for each in runtime.translate(lines)]
    chosen = task["teacher"]
    assert isinstance(chosen, dict)
    folder = chosen.pop("folder")
    teacher = open_teacher(TeacherChoice(folder=None if folder is None else Path(folder), **chosen))
    return lambda lines: [best[0] for best in teacher.translate(lines, "text", 1, lambda _: None)]


def _processor_seconds() -> float:
    """Returns processor time of this process and of programs that it has run."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _main() -> int:
    task = json.load(sys.stdin)
    try:
        translate = _translator(task)
        lines: list[str] = task["lines"]
        translate(lines[:WARM_UP])
        seconds = []
        for _ in range(ROUNDS):
            began = _processor_seconds()
            texts = translate(lines)
            seconds.append(_processor_seconds() - began)
    except (EconmtError, econmt_runtime.RuntimeInputError) as error:
        print(error, file=sys.stderr)
        return 1
    json.dump({"texts": texts, "seconds": min(seconds)}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
