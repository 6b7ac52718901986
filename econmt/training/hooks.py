"""Validation hook: a program, or a function of Python, that gets the translations of a checkpoint and judges them."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from econmt.errors import InputError


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
_POLL = 0.2
"""Seconds between two polls of a running program."""


def program_hook(command: str) -> Hook:
    """Returns the hook that runs a program: its translations are lines on standard input, its figure the last word.

    The program finds the validation text in the files ``$ECONMT_SOURCE`` and ``$ECONMT_REFERENCE``, whose first lines
    are those of the translations, and the checkpoint's update in ``$ECONMT_UPDATE``.

    Raises:
        InputError: there is no such program.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"--validation-hook {command}: {error}; quote its arguments as in a shell") from None
    if not words or shutil.which(words[0]) is None:
        raise InputError(
            f"--validation-hook {command}: no such program; give one that can be executed, with its arguments"
        )

    def run(judged: Judged, stop: Callable[[], bool]) -> float:
        files = {"ECONMT_SOURCE": str(judged.source), "ECONMT_REFERENCE": str(judged.reference)}
        environment = {**os.environ, **files, "ECONMT_UPDATE": str(judged.update)}
        with tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n") as lines:
            lines.writelines(f"{line}\n" for line in judged.hypotheses)
            lines.seek(0)
            try:
                process = subprocess.Popen(  # noqa: S603  the user's own program
                    words,
                    stdin=lines,
                    stdout=subprocess.PIPE,
                    env=environment,
                    encoding="utf-8",
                    errors="replace",
                )
            except OSError as error:
                raise HookError(f"{words[0]}: {error.strerror}") from None
            with process:
                return _figure(command, process, stop)

    return run


def _figure(command: str, process: subprocess.Popen[str], stop: Callable[[], bool]) -> float:
    """Returns the figure at the end of a program's output; ends the program if the run has to stop."""
    while True:
        try:
            output, _ = process.communicate(timeout=_POLL)
            break
        except subprocess.TimeoutExpired:
            if stop():
                process.kill()
                raise InterruptedError from None
    if process.returncode:
        raise HookError(f"{command}: ended with exit code {process.returncode}")
    last = (output.split() or [""])[-1]
    figure = (
        float(last) if re.fullmatch(r"[-+]?[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?", last, re.IGNORECASE) else math.nan
    )
    if not math.isfinite(figure):
        raise HookError(f"{command}: its output ends with '{last[:40]}'; the last word must be a number")
    return figure
