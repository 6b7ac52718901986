"""Programs as teachers: they read lines and write a translation of each."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import IO

from econmt.data.text.corpus import decode_line
from econmt.distillation.teachers import Done
from econmt.errors import InputError


class ProgramTeacher:
    """Program that reads lines and writes a translation of each; it is run without a shell."""

    def __init__(self, command: str) -> None:
        self._command = command
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise InputError(f"--command {command}: {error}; quote its arguments as in a shell") from None
        if not self._words or shutil.which(self._words[0]) is None:
            raise InputError(
                f"--command {command}: no such program; give one that can be executed, with its arguments"
            )

    def translate(self, lines: Sequence[str], where: str, first: int, done: Done) -> list[list[str]]:
        """Translates lines; see :class:`Teacher`. The program does not get blank lines, which some programs drop."""
        filled = [line for line in lines if line.strip()]
        place = f"{where}:{first} to {first + len(lines) - 1}"
        done(len(lines) - len(filled))
        found = iter(self._run(filled, place, done) if filled else ())
        return [[next(found) if line.strip() else ""] for line in lines]

    def _run(self, lines: Sequence[str], place: str, done: Done) -> list[str]:
        with (
            tempfile.TemporaryFile() as text,
            tempfile.TemporaryFile() as complaints,
        ):
            text.write("".join(f"{line}\n" for line in lines).encode())
            text.seek(0)
            process = subprocess.Popen(  # noqa: S603  the user's own program
                self._words, stdin=text, stdout=subprocess.PIPE, stderr=complaints
            )
            try:
                assert process.stdout is not None
                translations = self._read(process.stdout, place, done)
                code = process.wait()
            finally:
                process.kill()
                process.wait()
            if code or len(translations) != len(lines):
                problem = (
                    f"ended with exit code {code}"
                    if code
                    else f"wrote {len(translations):,} lines for {len(lines):,}; it must write one for each"
                )
                said = _last_line(complaints)
                raise InputError(
                    f"--command {self._command}: {problem} ({place})" + (f"; it said: {said}" if said else "")
                )
            return translations

    def _read(self, stream: IO[bytes], place: str, done: Done) -> list[str]:
        translations = []
        with stream:
            for number, line in enumerate(stream, 1):
                translations.append(
                    decode_line(line, f"--command {self._command}, output of {place}", number)
                )
                done(1)
        return translations


def _last_line(stream: IO[bytes]) -> str:
    """Returns the last line that is not blank of the last 4 KiB of a file."""
    stream.seek(max(0, stream.seek(0, 2) - 4096))
    lines = stream.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
