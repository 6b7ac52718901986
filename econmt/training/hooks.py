"""Validation hook: a program, or a function of Python, that gets the translations of a checkpoint and judges them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from econmt.data.user_programs import ProgramError, program_words, start_program


class Judged(NamedTuple):
    """Translations of the validation text, which a hook judges, the files of its raw text, and the update."""

    hypotheses: Sequence[str]
    source: Path
    reference: Path
    update: int


class HookError(Exception):
    """The hook returned no figure; training continues without one."""


Hook = Callable[[Judged, Callable[[], bool]], float]
"""Function from what is judged, and one that is polled and returns True if the run has to stop, to a figure.

Higher figures are better. It raises :class:`HookError` if there is none, and InterruptedError if it was stopped.
"""


def program_hook(command: str) -> Hook:
    """Returns the hook that runs a program: its translations are lines on standard input, its figure the last word.

    The program finds the validation text in the files ``$ECONMT_SOURCE`` and ``$ECONMT_REFERENCE``, whose first lines
    are those of the translations, and the checkpoint's update in ``$ECONMT_UPDATE``.

    Raises:
        InputError: there is no such program.
    """
    words = program_words("--validation-hook", command)

    def run(judged: Judged, stop: Callable[[], bool]) -> float:
        files = {"ECONMT_SOURCE": str(judged.source), "ECONMT_REFERENCE": str(judged.reference)}
        files["ECONMT_UPDATE"] = str(judged.update)
        last = b""
        try:
            with start_program(words, judged.hypotheses, files) as program:
                for line in program.output(stop):
                    last = line if line.strip() else last
        except ProgramError as error:
            raise HookError(f"{command}: {error}") from None
        if program.code:
            raise HookError(f"{command}: ended with exit code {program.code}")
        return _figure(command, last.decode("utf-8", "replace"))

    return run


def _figure(command: str, output: str) -> float:
    """Returns the number that the output of a program ends with."""
    last = (output.split() or [""])[-1]
    figure = (
        float(last) if re.fullmatch(r"[-+]?[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?", last, re.IGNORECASE) else math.nan
    )
    if not math.isfinite(figure):
        raise HookError(f"{command}: its output ends with '{last[:40]}'; the last word must be a number")
    return figure
