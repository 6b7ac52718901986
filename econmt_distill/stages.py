"""The way from a teacher to a student: translate, choose, train, pack, measure."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from econmt.api import InputError, SavedModel, check_training, train
from econmt.api.commands import notice, status_line, usable_cores
from econmt.api.export import check_supported
from econmt.api.files import count_lines, locked_folder, read_lines
from econmt.api.recipes import Recipe, find_corpus, find_recipe, search_path
from econmt_distill.inputs import read_inputs, write_record
from econmt_distill.measuring import DistillationResults, measure
from econmt_distill.packing import PackedStudent, pack
from econmt_distill.selection import MODEL, different_lines, make_text
from econmt_distill.shards import Shards
from econmt_distill.student import StudentChoice
from econmt_distill.teachers import TeacherChoice

TRANSLATIONS = "translations"
"""Name of the folder of translations, the first that is made."""
TEXT = "text/train"
"""Prefix of the student's text in its recipe, in the folder of the distillation, so that this folder may be moved."""
TRAINED_ON = "trained-on.json"
"""Name of the file of what the text was made from that the student is trained on."""


class Distillation(NamedTuple):
    """Inputs of a distillation.

    Attributes:
        teacher: The teacher. student: The student's recipe.
        source: Text to translate. target: References of it, by which translations are chosen; None: none.
        output: Folder of everything that is made.
        shard_lines: Lines in a shard of translations; None: 32,768 on a GPU and 2,048 elsewhere.
        shortlist: Number of target words that each source word adds to a shortlist.
        data_dir: Folder in which text is searched first.
    """

    teacher: TeacherChoice
    student: StudentChoice
    source: Path
    target: Path | None
    output: Path
    shard_lines: int | None = None
    shortlist: int = 30
    data_dir: Path | None = None


class Distilled(NamedTuple):
    """Outcome: figures of teacher and student, the student's forms, and its recipe."""

    results: DistillationResults
    student: PackedStudent
    recipe: Recipe


def distill(wanted: Distillation, *, quiet: bool = False) -> Distilled:
    """Makes a student of a teacher, or goes on where an earlier call with the same inputs was stopped.

    Finished shards are not translated again, training resumes, and later stages redo what is missing.

    Args:
        wanted: The inputs. quiet: True to print nothing of training.

    Raises:
        InputError: An input cannot be used, or differs from that of the work in the folder.
        EconmtError: The teacher or training had to stop.
        Interrupted: SIGTERM or Ctrl-C was received during training; everything is saved.
    """
    output, teacher = wanted.output, wanted.teacher
    search = [output.resolve(), *search_path(find_recipe(wanted.student.recipe).parent, wanted.data_dir)]
    model, trained_on = SavedModel(output / MODEL), output / TRAINED_ON
    text_folder = (output / TEXT).parent

    def recipe_with(ratio: float) -> Recipe:
        suffixes = _suffixes(wanted.source, wanted.target)
        return wanted.student.load(model.folder, TEXT, teacher.recipe, suffixes, ratio)

    recipe = recipe_with(1.0)
    _check_early(wanted, recipe, search)
    _check_folder(output)
    with locked_folder(output):
        with status_line() as say:
            shards = Shards(output / TRANSLATIONS, teacher, wanted.source, wanted.shard_lines)
            if shards.missing() and not model.is_begun:
                # A program may have changed behind the same command.
                shutil.rmtree(text_folder, ignore_errors=True)
            shards.translate(say)
            _free_gpu()
            trained = read_inputs(trained_on, trained_on) if model.is_begun else None
            languages = recipe.pairs.source, recipe.pairs.target
            processes = teacher.threads or usable_cores()
            text = make_text(text_folder, shards, languages, wanted.target, trained, processes, say)
        write_record(trained_on, text.inputs)
        recipe = recipe_with(text.statistics.ratio)
        _check_resumable(recipe, model)
        statistics = text.statistics
        if 2 * statistics.copies > statistics.pairs - statistics.blank:
            share = f"{statistics.copies:,} of {statistics.pairs - statistics.blank:,} lines"
            notice(f"warning: {teacher.name}: many translations are copies of their source, {share}")
        if wanted.target is not None:
            count = f"{statistics.chosen:,} of {statistics.pairs:,} lines"
            notice(f"the references chose another translation than the teacher's best for {count}")
            if kept := statistics.kept:
                notice(
                    f"the reference itself is learnt for {kept:,} line{'s' * (kept > 1)}, longer than data.max_length "
                    "of the teacher or without a translation"
                )
        notice(f"training the student in {model.folder}")
        train(recipe, search=search, quiet=quiet)
        with status_line() as say:
            packed = pack(output, recipe, search, wanted.shortlist, say)
            results = measure(output, teacher, recipe, packed, search, say)
    return Distilled(results, packed, recipe)


def _check_early(wanted: Distillation, recipe: Recipe, search: Sequence[Path]) -> None:
    """Checks before hours of translation that the student can be trained and packed.

    Raises:
        InputError: A text is not found, the recipe cannot be trained, or the runtime does not support the model.
    """
    lines = count_lines(wanted.source)
    if not lines:
        next(read_lines(wanted.source))  # says what is wrong with it
    elif wanted.target is not None:
        next(read_lines(wanted.target))
        references = count_lines(wanted.target) or 0
        if references != lines:
            raise different_lines(wanted.target, "more" if references > lines else "fewer", lines)
    data = recipe.pairs
    if data.source_factors:
        raise InputError("data.source_factors: a distilled text has none; give another student's recipe")
    if data.source == data.target:
        raise InputError(
            f"data.source and data.target are both {data.source}, and each names a file of the distilled text; give "
            "data.source=LANGUAGE and data.target=LANGUAGE"
        )
    for prefix in (*data.train[1:], data.valid, *filter(None, [data.test])):
        if os.path.normpath(prefix) == TEXT:
            raise InputError(
                f"{prefix}: the student's recipe names the distilled text so; give {Path(prefix).absolute()}"
            )
    check_supported(recipe, Path(recipe.output))
    check_training(recipe)
    for prefix in (*data.train[1:], data.valid, *filter(None, [data.test])):
        find_corpus(prefix, data.source, data.target, search, progress=True)


def _free_gpu() -> None:
    """Gives back the memory that the teacher's searches have left."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _check_resumable(recipe: Recipe, model: SavedModel) -> None:
    """Raises InputError if the student's training has begun with another recipe."""
    if model.is_begun and (changes := model.changed_keys(recipe)):
        raise InputError(
            f"{model.folder}: is trained with another recipe: {'; '.join(changes)}; give the same, another --output, "
            f"or delete {model.folder} to train again"
        )


def _suffixes(source: Path, target: Path | None) -> dict[str, str]:
    """Returns the languages that the names of the text files end with, by the key of the data section."""
    files = {"source": source, "target": target}
    names = {key: path.name.removesuffix(".gz") for key, path in files.items() if path is not None}
    return {key: name.rpartition(".")[2] for key, name in names.items() if "." in name}


def _check_folder(output: Path) -> None:
    """Raises InputError if a folder holds files, but no distillation."""
    held = (
        [] if not output.is_dir() else sorted(path.name for path in output.iterdir() if path.name != ".lock")
    )
    if held and not {TRANSLATIONS, TRAINED_ON}.intersection(held):
        raise InputError(f"{output}: holds {held[0]} and no distillation; give another --output")
