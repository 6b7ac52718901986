"""``econmt distill``: makes a small, fast student of a teacher, from its translations to a measured runtime."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import typer
from rich.table import Column, Table

from econmt.api import InputError, limits
from econmt.api.checked_json import json_text
from econmt.api.commands import (
    DataDirOption,
    Interrupted,
    OverridesArgument,
    argument,
    is_quiet,
    notice,
    option,
    print_table,
    printable,
    recipe_option,
    table_console,
)
from econmt.api.saved_model import local_model
from econmt_distill.measuring import DistillationResults
from econmt_distill.stages import Distillation, Distilled
from econmt_distill.stages import distill as run
from econmt_distill.student import StudentChoice
from econmt_distill.teachers import DOWNLOADED, TeacherChoice


@dataclass(frozen=True)
class TeacherOptions:
    """Teacher, and its search for translations."""

    heading: ClassVar[str] = "Teacher"
    command: str | None = option(
        None,
        help="Instead of TEACHER: program that reads lines and writes a translation of each, with its arguments, as "
        "'apertium eng-spa'. It is run without a shell, once for each shard.",
        metavar="PROGRAM",
    )
    beam_size: int | None = recipe_option(
        "decoding.beam_size",
        "--beam-size",
        "-b",
        help="Hypotheses kept at each step of the teacher's search.",
    )
    nbest_size: int | None = option(
        None,
        help="With --target: number of translations of each line to choose from.",
        min=1,
        max=limits.NBEST,
        show_default="the beam size, at most 5",
    )
    batch_size: int | None = option(
        None,
        help="Number of sentences translated together.",
        min=1,
        max=limits.TRANSLATED,
        show_default="512 on a GPU, else the teacher's",
    )
    codes: str | None = option(
        None,
        help="Codes of both languages in the vocabulary of a multilingual model, with a comma: eng_Latn,spa_Latn.",
        metavar="SOURCE,TARGET",
    )
    precision: Literal["auto", "float32", "bfloat16", "float16", "int8"] = option(
        "auto", help="Precision of the teacher's matrix products; auto picks the faster one on this device."
    )


@dataclass(frozen=True)
class TextOptions:
    """Text that the student learns from."""

    heading: ClassVar[str] = "Text"
    source: Path = option(..., "--source", "-s", help="Text to translate, one sentence per line, also .gz.")
    target: Path | None = option(
        None,
        "--target",
        "-t",
        help="References of the source: of the teacher's n best translations, the student learns the one with the "
        "highest sentence BLEU.",
    )
    also: list[str] | None = option(
        None, help="Prefix of parallel text to learn from as well, as in data.train; may be repeated."
    )
    valid: str | None = option(
        None, help="Prefix of the validation text.", show_default="the teacher's", metavar="PREFIX"
    )
    test: str | None = option(
        None,
        help="Prefix of the text by which teacher and student are compared.",
        show_default="the teacher's, or the validation text",
        metavar="PREFIX",
    )
    data_dir: DataDirOption = None
    shard_lines: int | None = option(
        None,
        help="Number of lines that are translated and written at a time.",
        min=1,
        max=limits.LINES,
        show_default="32768 on a GPU, else 2048",
    )


@dataclass(frozen=True)
class StudentOptions:
    """Student, and the folder that everything is written to."""

    heading: ClassVar[str] = "Student"
    recipe: str = option("student", "--recipe", "-r", help="Student's recipe: a YAML file or a shipped name.")
    output: Path = option(Path("runs/student"), "--output", "-o", help="Folder of everything that is made.")
    shortlist: int = option(
        30,
        help="Number of target words that each source word adds to those that the student chooses from.",
        min=1,
        max=limits.SHORTLIST,
    )


def distill(
    teacher: Path | None = argument(
        None,
        help="Teacher: folder of a model of econmt, transformers or CTranslate2, or hf://OWNER/NAME.",
        show_default=False,
    ),
    overrides: OverridesArgument = None,
    *,
    text: TextOptions,
    teaching: TeacherOptions,
    student: StudentOptions,
    device: str | None = option(
        None, help="Device of the teacher and of training: auto, cpu, cuda or cuda:N.", show_default="auto"
    ),
    threads: int | None = option(
        None,
        help="Number of CPU threads.",
        min=1,
        max=limits.THREADS,
        show_default="as many as are fastest here",
    ),
    as_json: bool = option(False, "--json", help="Print JSON with unrounded figures instead of the table."),
) -> None:
    """Train a small, fast student on a teacher's translations, and compare both.

    Translates the text in shards, trains the student, converts it to 8 bits with shortlists for a runtime without
    PyTorch, and prints BLEU, size and speed of both. The same command goes on after any interruption.

    \b
    Example:
      econmt distill runs/multi30k --source train.en --output runs/student
      econmt distill --command ./eng-spa -s a.en --valid dev data.target=es
    """
    changes = list(overrides or ())
    if teaching.command is not None and teacher is not None and "=" in str(teacher):
        teacher, changes = None, [str(teacher), *changes]  # there is no TEACHER before them
    also = tuple(text.also or ())
    wanted = Distillation(
        _teacher(teacher, text, teaching, device, threads),
        StudentChoice(student.recipe, tuple(changes), text.valid, text.test, also, device, threads),
        text.source,
        text.target,
        student.output,
        text.shard_lines,
        student.shortlist,
        text.data_dir,
    )
    try:
        distilled = run(wanted, quiet=is_quiet())
    except Interrupted as interrupted:
        print(f"econmt: {interrupted}", file=sys.stderr)
        raise typer.Exit(interrupted.exit_code) from interrupted
    except KeyboardInterrupt:
        notice(f"stopped; run the same command to go on in {student.output}")
        raise
    if as_json:
        print(json_text(distilled.results.model_dump(exclude={"inputs"}), indent=2))
    else:
        print_table(table_console(), results_table(distilled.results))
    sys.stdout.flush()
    if not is_quiet():
        _print_commands(distilled)


def _teacher(
    folder: Path | None, text: TextOptions, teaching: TeacherOptions, device: str | None, threads: int | None
) -> TeacherChoice:
    """Returns the teacher that the options describe.

    Raises:
        InputError: Options contradict each other or would change nothing.
    """
    if (folder is None) == (teaching.command is None):
        raise InputError("give either a TEACHER, the folder of a model, or a program as --command")
    if teaching.command is not None:
        return TeacherChoice(command=teaching.command, threads=threads)
    assert folder is not None
    choice = TeacherChoice(
        local_model(folder, DOWNLOADED),
        None,
        teaching.beam_size,
        1,
        teaching.batch_size,
        device or "auto",
        threads,
        teaching.precision,
        _codes(teaching.codes),
    )
    if choice.kind == "econmt" and teaching.codes is not None:
        raise InputError("--codes is for models of other toolkits; leave it out")
    return choice if text.target is None else choice.with_nbest(teaching.nbest_size)


def _codes(text: str | None) -> tuple[str, str] | None:
    """Returns the codes of both languages; raises InputError if there are not two."""
    if text is None:
        return None
    codes = [code.strip() for code in text.split(",")]
    if len(codes) != 2 or not all(codes):
        raise InputError(f"--codes {text}: give two codes with a comma between them, as eng_Latn,spa_Latn")
    return codes[0], codes[1]


def results_table(results: DistillationResults) -> Table:
    """Returns the table of teacher and student."""
    columns = (Column(heading, justify="right") for heading in ("BLEU", "MB", "words/s, one core"))
    text = f"{results.corpus} text {printable(results.text)}, {results.sentences:,} sentences"
    table = Table("model", *columns, title=text)
    for model in results.models:
        size = "" if model.bytes is None else f"{model.bytes / 1e6:.1f}"
        speed = f"{model.words_per_second:,.0f}"
        table.add_row(f"{model.form}: {printable(model.name)}", f"{model.bleu:.2f}", size, speed)
    return table


def _print_commands(distilled: Distilled) -> None:
    """Prints lines that use the student, on standard error."""
    lexicon, int8, runtime = (shlex.quote(str(path)) for path in distilled.student)
    for line in (
        "with this student:",
        f"  python {runtime} < TEXT",
        f"  econmt translate -m {int8} --restrict-lexicon {lexicon}",
        f"  econmt serve -m {int8}",
    ):
        print(printable(line), file=sys.stderr)
