"""Opens teachers: model folders of econmt, and the other kinds, whose packages are imported only when they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from econmt.api import InputError, load
from econmt.api.commands import notice
from econmt_distill.foreign import CTranslate2Teacher, TransformersTeacher
from econmt_distill.programs import ProgramTeacher
from econmt_distill.teachers import GPU_BATCH, Done, Teacher, TeacherChoice


def open_teacher(choice: TeacherChoice) -> Teacher:
    """Loads a model or finds a program.

    Raises:
        InputError: The model cannot be loaded, there is no such program, or an option does not suit it.
    """
    if choice.command is not None:
        return ProgramTeacher(choice.command)
    kinds: dict[str, Callable[[TeacherChoice], Teacher]]
    kinds = {"econmt": ModelTeacher, "transformers": TransformersTeacher, "ctranslate2": CTranslate2Teacher}
    return kinds[choice.kind](choice)


class ModelTeacher:
    """Model folder of econmt."""

    def __init__(self, choice: TeacherChoice) -> None:
        assert choice.folder is not None
        model = load(
            choice.folder, device=choice.device, precision=choice.precision, threads=choice.threads or "auto"
        )
        if model.vocabularies.factors:
            raise InputError(f"{choice.folder}: needs source factors, which a text to distil does not have")
        self._doubts: list[str] = []
        self._told = False
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
        if self._doubts and not self._told:  # once, not for each shard
            self._told = True
            more = len(self._doubts) - 1
            others = f"and {more:,} more line{'s' * (more > 1)}; " if more else ""
            notice(f"warning: {self._doubts[0]} ({others}lines of later shards are not named)")
        return [[each.text for each in best.hypotheses] or [best.text] for best in translations]
