"""Quality, size and speed of teacher and student."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.tensor_files import write_text
from econmt.config.json_reader import Record, json_text, read_json
from econmt.config.recipe import Recipe
from econmt.data.batching.store import open_prepared, store_folder
from econmt.evaluation.metrics import bleu, recipe_tokenizer
from econmt_distill.inputs import StageInputs, differences, take_inputs
from econmt_distill.packing import PackedStudent
from econmt_distill.shards import Shards
from econmt_distill.teachers import TeacherChoice, model_files
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
    say: Callable[[str], object],
) -> DistillationResults:
    """Measures teacher and student on the test text, or the validation text without one; writes results.json.

    Results that were measured with the same models and text are not measured again.

    Args:
        output: Folder of the distillation.
        teacher: The teacher. recipe: The student's recipe. packed: The student's forms.
        say: Called with the current activity.
    """
    path, store = output / "results.json", store_folder(recipe)
    split: Literal["test", "valid"] = "valid" if recipe.data.test is None else "test"
    source, target = (store / f"{split}.{side}.txt" for side in ("source", "target"))
    student = ModelFolder(recipe.output)
    teacher = replace(teacher, nbest_size=1)
    try:
        before = read_json(DistillationResults, path, f"delete {path} and run the command again")
    except FileNotFoundError:
        before = None
    files = {
        "source": source,
        "target": target,
        **teacher.files,
        "student": student.best,
        "lexicon": packed.lexicon,
    }
    inputs = take_inputs(teacher.settings, files, None if before is None else before.inputs)
    if before is not None and not differences(before.inputs, inputs):
        return before
    shards = Shards(output / "test", teacher, source, None, replace=True)
    shards.translate(lambda text: say(f"the teacher on the {split} text: {text}"))
    text = open_prepared(store)
    lines, references = text.test_text[:2] if split == "test" else text.valid_text[:2]
    tokenizer = recipe_tokenizer(recipe).name
    score = bleu([best[0] for _, best in shards], references, tokenizer)
    sample = lines[:: max(1, len(lines) // SAMPLE)]
    say(f"timing {teacher.name} on one core with {len(sample):,} lines")
    speed = timed(teacher, sample).words_per_second
    size = total_bytes(teacher.files.values()) if teacher.folder is not None else None
    models = [
        MeasuredModel(name=teacher.name, form="teacher", bleu=score.value, bytes=size, words_per_second=speed)
    ]
    trained = TeacherChoice(folder=student.path, precision="float32")
    runtime = [path for path in packed.runtime.rglob("*") if path.is_file()]
    forms: list[tuple[str, TeacherChoice | Path, Path, Iterable[Path]]] = [
        ("student", trained, student.path, model_files(student.path)),
        ("student, 8 bits", packed.runtime, packed.runtime, runtime),
    ]
    for form, model, folder, needed in forms:
        say(f"timing {folder} on one core with {len(lines):,} lines")
        result = timed(model, lines)
        quality = bleu(result.texts, references, tokenizer).value
        models.append(
            MeasuredModel(
                name=str(folder),
                form=form,
                bleu=quality,
                bytes=total_bytes(needed),
                words_per_second=result.words_per_second,
            )
        )
    results = DistillationResults(
        text=str(recipe.data.test or recipe.data.valid),
        corpus="test" if split == "test" else "validation",
        sentences=len(lines),
        signature=score.signature,
        models=models,
        inputs=inputs,
    )
    write_text(path, json_text(results.model_dump(), indent=1) + "\n")
    return results


def total_bytes(files: Iterable[Path]) -> int:
    """Returns the sum of the sizes of files."""
    return sum(path.stat().st_size for path in files)
