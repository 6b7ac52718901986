"""Programs as teachers: they read lines and write a translation of each."""

from __future__ import annotations

from collections.abc import Sequence

from econmt.api import InputError
from econmt.api.files import decode_line
from econmt.api.programs import ProgramError, UserProgram, program_words, start_program
from econmt_distill.teachers import Done

_DIFFERENT_LINES = 10
"""Number of different lines that cannot all have the same translation; a few can, such as forms of thanks."""


class ProgramTeacher:
    """Program that reads lines and writes a translation of each."""

    def __init__(self, command: str) -> None:
        self._command, self._words = f"{command:.200}", program_words("--command", command)

    def translate(self, lines: Sequence[str], where: str, first: int, done: Done) -> list[list[str]]:
        """Translates lines; see :class:`Teacher`. The program does not get blank lines, which some programs drop."""
        filled = [line for line in lines if line.strip()]
        place = f"{where}:{first} to {first + len(lines) - 1}"
        done(len(lines) - len(filled))
        found = iter(self._run(filled, place, done) if filled else ())
        return [[next(found) if line.strip() else ""] for line in lines]

    def _run(self, lines: Sequence[str], place: str, done: Done) -> list[str]:
        said = ""
        try:
            with start_program(self._words, lines, keep_errors=True) as program:
                try:
                    return self._translations(program, lines, place, done)
                finally:
                    said = f"; it said: {program.complaint}" if program.complaint else ""
        except ProgramError as error:
            raise InputError(f"--command {self._command}: {error} ({place}){said}") from None

    def _translations(self, program: UserProgram, lines: Sequence[str], place: str, done: Done) -> list[str]:
        translations: list[str] = []
        for number, line in enumerate(program.output(), 1):
            if number > len(lines):
                raise ProgramError(f"wrote more than {len(lines):,} lines; it must write one for each")
            translations.append(decode_line(line, f"--command {self._command}, output of {place}", number))
            done(1)
        if program.code:
            raise ProgramError(f"ended with exit code {program.code}")
        if len(translations) < len(lines):
            raise ProgramError(
                f"wrote {len(translations):,} lines for {len(lines):,}; it must write one for each"
            )
        if len(set(translations)) == 1 and len(set(lines)) >= _DIFFERENT_LINES:
            raise ProgramError(
                f"wrote {translations[0]!r:.100} for each of {len(lines):,} lines, which differ"
            )
        return translations
