"""Teachers: model folders of econmt, programs that turn lines into lines, and models of other toolkits."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal, Protocol

from econmt.api import load
from econmt.api.language_model import refuse_language_model
from econmt.checkpoint.checkpoints import parameter_file
from econmt.checkpoint.folder import ModelFolder
from econmt.config.recipe import Recipe
from econmt.data.files import notice
from econmt.data.text.corpus import decode_line
from econmt.data.text.subwords import vocabulary_files
from econmt.errors import InputError
from econmt.export.model_folder import recipe_of

Done = Callable[[int], object]
"""Function that is called with the number of lines translated since the last call."""

DEFAULT_BEAM = 5
"""Beam size of models that do not say any."""
MOST_CHOICES = 5
"""Default of the largest number of translations to choose from."""
GPU_BATCH = 512
"""Sentences translated together on a GPU unless a number is given."""


class Teacher(Protocol):
    """Translator of lines of text, one sentence per line."""

    def translate(self, lines: Sequence[str], where: str, first: int, done: Done) -> list[list[str]]:
        """Translates lines.

        Args:
            lines: Lines without line ends.
            where: Name of the text in messages. first: Number of the first line in it.
            done: Called with the number of further lines that are done.

        Returns:
            The n best translations of each line, best first, at least one; that of a blank line is empty.

        Raises:
            EconmtError: A line cannot be translated; the message names text and line.
        """
        ...


@dataclass(frozen=True)
class TeacherChoice:
    """A teacher and how it searches; it is opened only when there is something to translate.

    Attributes:
        folder: Folder of a model. command: Program with its arguments; one of both is given.
        beam_size: Hypotheses kept at each step; None: the model's own number.
        nbest_size: Number of translations of a line.
        batch_size: Sentences translated together; None: 512 on a GPU, else the model's own number.
        device: auto, cpu, cuda or cuda:N. threads: CPU threads; None: as many as are fastest.
        precision: Precision of matrix products.
    """

    folder: Path | None = None
    command: str | None = None
    beam_size: int | None = None
    nbest_size: int = 1
    batch_size: int | None = None
    device: str = "auto"
    threads: int | None = None
    precision: str = "auto"

    @property
    def name(self) -> str:
        """Name of the teacher in messages."""
        return str(self.command if self.folder is None else self.folder)

    @property
    def kind(self) -> Literal["econmt", "program"]:
        """Kind of the teacher, by the files in its folder.

        Raises:
            InputError: There is no such folder, or it holds no model.
        """
        if self.folder is None:
            return "program"
        if not self.folder.is_dir():
            raise InputError(
                f"{self.folder}: no such folder; give a model folder, or a program as --command 'PROGRAM ARGUMENTS'"
            )
        if (self.folder / "recipe.yaml").is_file():
            return "econmt"
        raise InputError(
            f"{self.folder}: holds no model that econmt knows: no recipe.yaml; give a model folder"
        )

    @property
    def recipe(self) -> Recipe | None:
        """Recipe of a model folder of econmt; None for other teachers."""
        if self.kind != "econmt":
            return None
        assert self.folder is not None
        return recipe_of(ModelFolder(self.folder), "econmt distill")

    @property
    def files(self) -> dict[str, Path]:
        """Files that the translations depend on, by the name that messages give them."""
        if self.folder is None:
            return {}
        folder = ModelFolder(self.folder)
        paths = [folder.recipe, parameter_file(folder, "best"), *vocabulary_files(self.folder)]
        return {f"the teacher's {path.name}": path for path in paths}

    @property
    def settings(self) -> dict[str, str]:
        """Settings that the translations depend on, by the names of their options."""
        if self.command is not None:
            return {"--command": self.command}
        return {
            "kind of teacher": self.kind,
            "--beam-size": str(self.beam_size or "the model's"),
            "--nbest-size": str(self.nbest_size),
        }

    def with_nbest(self, size: int | None) -> TeacherChoice:
        """Returns this teacher with several translations of each line; None: as many as the beam has, at most five.

        Raises:
            InputError: The beam is smaller.
        """
        recipe = self.recipe
        beam = self.beam_size or (DEFAULT_BEAM if recipe is None else recipe.decoding.beam_size)
        if (size or beam) > beam:
            raise InputError(
                f"--nbest-size {size}: more than the teacher's beam size of {beam}; raise --beam-size or lower it"
            )
        return replace(self, beam_size=self.beam_size or beam, nbest_size=size or min(beam, MOST_CHOICES))

    def open(self) -> Teacher:
        """Loads the model or finds the program.

        Raises:
            InputError: The model cannot be loaded, there is no such program, or an option does not suit it.
        """
        return ProgramTeacher(self.command) if self.command is not None else ModelTeacher(self)


class ModelTeacher:
    """Model folder of econmt."""

    def __init__(self, choice: TeacherChoice) -> None:
        assert choice.folder is not None
        model = load(
            choice.folder, device=choice.device, precision=choice.precision, threads=choice.threads or "auto"
        )
        refuse_language_model(model, choice.folder)
        if model.vocabularies.factors:
            raise InputError(f"{choice.folder}: needs source factors, which a text to distil does not have")
        self._doubts: list[str] = []
        default = GPU_BATCH if model.device.type == "cuda" else None
        self._translator = model.translator(
            {"beam_size": choice.beam_size, "nbest_size": choice.nbest_size, "attention": False},
            batch_size=choice.batch_size or default,
            long_lines="skip",
            warn=self._doubts.append,
        )

    def translate(self, lines: Sequence[str], where: str, first: int, done: Done) -> list[list[str]]:
        """Translates lines; see :class:`Teacher`."""
        self._doubts.clear()
        # All lines at once: they are sorted by length and batched by tokens.
        translations = self._translator.translate_chunk(lines, first, where, done)
        if self._doubts:
            more = f" (and {len(self._doubts) - 1:,} more lines)" if len(self._doubts) > 1 else ""
            notice(f"warning: {self._doubts[0]}{more}")
        return [[each.text for each in best.hypotheses] or [best.text] for best in translations]


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
