"""Teachers: model folders of econmt, programs that turn lines into lines, and models of other toolkits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from econmt.api import InputError, SavedModel
from econmt.api.recipes import Recipe
from econmt.api.saved_model import FILES

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


_KINDS: dict[str, Literal["econmt", "transformers", "ctranslate2"]] = {
    "recipe.yaml": "econmt",
    "model.bin": "ctranslate2",
    "config.json": "transformers",
}
"""Kinds of models by a file that their folders have."""
_MODEL_SUFFIXES = (".safetensors", ".bin", ".json", ".spm", ".model", ".txt")
DOWNLOADED = (*FILES, *(f"*{suffix}" for suffix in _MODEL_SUFFIXES if suffix != ".bin"), "model.bin")
"""Patterns of the files of a model of any kind that are downloaded from the Hub."""


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
        codes: Codes of both languages in the vocabulary of a multilingual model of another toolkit.
    """

    folder: Path | None = None
    command: str | None = None
    beam_size: int | None = None
    nbest_size: int = 1
    batch_size: int | None = None
    device: str = "auto"
    threads: int | None = None
    precision: str = "auto"
    codes: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """Name of the teacher in messages."""
        return str(self.command if self.folder is None else self.folder)

    @property
    def kind(self) -> Literal["econmt", "transformers", "ctranslate2", "program"]:
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
        for name, kind in _KINDS.items():
            if (self.folder / name).is_file():
                return kind
        raise InputError(
            f"{self.folder}: holds no model; give a model folder of econmt (recipe.yaml), CTranslate2 (model.bin) or "
            "Hugging Face's transformers (config.json)"
        )

    @property
    def recipe(self) -> Recipe | None:
        """Recipe of a model folder of econmt; None for other teachers.

        Raises:
            InputError: The folder holds a language model.
        """
        if self.folder is None or self.kind != "econmt":
            return None
        recipe = SavedModel(self.folder).recipe
        if recipe is not None and recipe.task != "translation":
            raise InputError(
                f"{self.folder}: holds a language model; econmt distill takes a translation model"
            )
        return recipe

    @property
    def files(self) -> dict[str, Path]:
        """Files that the translations depend on, by the name that messages give them."""
        if self.folder is None:
            return {}
        if self.kind == "econmt":
            paths = SavedModel(self.folder).files
        else:
            paths = [path for path in sorted(self.folder.iterdir()) if path.suffix in _MODEL_SUFFIXES]
        return {f"the teacher's {path.name}": path for path in paths}

    @property
    def settings(self) -> dict[str, str]:
        """Settings that the translations depend on, by the names of their options."""
        if self.command is not None:
            return {"--command": self.command}
        return {
            "kind of teacher": self.kind,
            **({} if self.codes is None else {"--codes": ",".join(self.codes)}),
            "--beam-size": str(self.beam_size or "the model's"),
            "--nbest-size": str(self.nbest_size),
        }

    def longer_than_training(self) -> Callable[[str, str], bool] | None:
        """Returns a function that says whether a source or its reference is longer than the teacher's training text.

        Translations of such lines are often cut short. None: nothing is known, as of teachers that are not of econmt.
        """
        recipe = self.recipe
        if recipe is None:
            return None
        assert self.folder is not None
        vocabularies, most = SavedModel(self.folder).vocabularies, recipe.pairs.max_length

        def longer(*pair: str) -> bool:
            # A token has a byte or more, so that short lines need not be cut into tokens.
            return any(
                len(text.encode()) >= most and len(side.encode(text)) > most
                for side, text in zip(vocabularies.sides, pair, strict=True)
            )

        return longer

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
