"""Quality, size and speed of teacher and student."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from econmt.api import SavedModel, Score, evaluate
from econmt.api.checked_json import Record, read_json
from econmt.api.files import read_lines
from econmt.api.recipes import Recipe, held_out_text, recipe_tokenizer
from econmt_distill.inputs import StageInputs, differences, take_inputs, write_record
from econmt_distill.packing import PackedStudent
from econmt_distill.shards import Shards
from econmt_distill.teachers import TeacherChoice
from econmt_distill.timing import timed

SAMPLE = 200
"""Lines by which a teacher's speed is measured, evenly spread over the text."""


class MeasuredModel(Record):
    """Figures of a model.

    Attributes:
        name: Folder or program. form: Kind of the model in words.
        bleu: BLEU on the text. bytes: Bytes of all files that translating needs; None for programs.
        words_per_second: Words of translations per second of processor time, with one thread.
    """

    name: str
    form: str
    bleu: float
    bytes: int | None
    words_per_second: float


class DistillationResults(Record):
    """Content of results.json: figures of teacher and student on a text, and what they were measured with."""

    text: str
    corpus: Literal["test", "validation"]
    sentences: int
    signature: str
    models: list[MeasuredModel]
    inputs: StageInputs


def measure(
    output: Path,
    teacher: TeacherChoice,
    recipe: Recipe,
    packed: PackedStudent,
    search: Sequence[Path],
    say: Callable[[str], object],
) -> DistillationResults:
    """Measures teacher and student on the test text, or the validation text without one; writes results.json.

    Results that were measured with the same models and text are not measured again.

    Args:
        output: Folder of the distillation.
        teacher: The teacher. recipe: The student's recipe. packed: The student's forms. search: Folders of its text.
        say: Called with the current activity.
    """
    path, text, student = output / "results.json", held_out_text(recipe, search), SavedModel(recipe.output)
    teacher = replace(teacher, nbest_size=1)
    try:
        before = read_json(DistillationResults, path, f"delete {path} and run the command again")
    except FileNotFoundError:
        before = None
    files = {
        "source": text.source,
        "target": text.target,
        **teacher.files,
        "student": student.parameters,
        "lexicon": packed.lexicon,
    }
    inputs = take_inputs(teacher.settings, files, None if before is None else before.inputs)
    if before is not None and not differences(before.inputs, inputs):
        return before
    shards = Shards(output / "test", teacher, text.source, None, replace=True)
    shards.translate(lambda doing: say(f"the teacher on the {text.kind} text: {doing}"))
    lines, references = list(read_lines(text.source)), list(read_lines(text.target))

    def bleu(translations: Sequence[str]) -> Score:
        return evaluate(translations, references, ["bleu"], tokenize=recipe_tokenizer(recipe).name)["bleu"]

    score = bleu([best[0] for _, best in shards])
    sample = lines[:: max(1, len(lines) // SAMPLE)]
    say(f"timing {teacher.name} on one core with {len(sample):,} lines")
    speed = timed(teacher, sample).words_per_second
    size = total_bytes(teacher.files.values()) if teacher.folder is not None else None
    models = [
        MeasuredModel(name=teacher.name, form="teacher", bleu=score.value, bytes=size, words_per_second=speed)
    ]
    trained = TeacherChoice(folder=student.folder, precision="float32")
    forms: list[tuple[str, TeacherChoice | Path, Path, Iterable[Path]]] = [
        ("student", trained, student.folder, student.files),
        ("student, 8 bits", packed.runtime, packed.runtime, filter(Path.is_file, packed.runtime.rglob("*"))),
    ]
    for form, model, folder, needed in forms:
        say(f"timing {folder} on one core with {len(lines):,} lines")
        result = timed(model, lines)
        models.append(
            MeasuredModel(
                name=str(folder),
                form=form,
                bleu=bleu(result.texts).value,
                bytes=total_bytes(needed),
                words_per_second=result.words_per_second,
            )
        )
    results = DistillationResults(
        text=text.prefix,
        corpus=text.kind,
        sentences=len(lines),
        signature=score.signature,
        models=models,
        inputs=inputs,
    )
    write_record(path, results)
    return results


def total_bytes(files: Iterable[Path]) -> int:
    """Returns the sum of the sizes of files."""
    return sum(path.stat().st_size for path in files)
