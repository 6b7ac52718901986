"""``econmt evaluate``: how good translations are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from sacrebleu.metrics.base import Metric

from econmt.cli.options import refuse_idle
from econmt.config import limits
from econmt.config.json_reader import json_text
from econmt.data.files import notice
from econmt.data.progress_bars import status_line
from econmt.data.text.corpus import read_lines
from econmt.decoding.streams import STANDARD_INPUT, read_chunks, standard_input
from econmt.errors import InputError, printable
from econmt.evaluation.metrics import (
    METRICS,
    Score,
    Significance,
    corpus_score,
    make_metric,
    paired_bootstrap,
    tokenizer_of,
)


def evaluate(
    context: typer.Context,
    references: Annotated[
        list[Path],
        typer.Option("--references", "-r", help="Reference translations; several sets are allowed."),
    ],
    hypotheses: Annotated[
        list[Path] | None,
        typer.Option(
            "--hypotheses",
            "-i",
            help="Translations to judge; several systems are compared with the first.",
            show_default="standard input",
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metrics", help="bleu, chrf, ter: several times, or with commas.", show_default="all"),
    ] = None,
    tokenize: Annotated[
        str | None,
        typer.Option(
            help="BLEU's tokenizer, in sacreBLEU's words; none for text that is tokenised already.",
            show_default="by the target language",
        ),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            "--language",
            "-l",
            help="Target language, which chooses BLEU's tokenizer: zh, ja, ko, th, ...",
            show_default="the suffix of the first reference",
        ),
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case in BLEU and chrF.")] = False,
    width: Annotated[
        int, typer.Option("--width", "-w", min=0, max=limits.DIGITS, help="Digits after the point.")
    ] = 2,
    samples: Annotated[
        int,
        typer.Option(min=1, max=limits.SAMPLES, help="Resampled test sets for the comparison of systems."),
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, figures not rounded.")] = False,
) -> None:
    """Print BLEU, chrF and TER with sacreBLEU and its signatures; compare systems by paired bootstrap resampling.

    \b
    Example:
      econmt translate -m runs/multi30k -i test.en | econmt evaluate -r test.de
      econmt evaluate -r test.de -i baseline.de -i new.de --metrics bleu
    """
    names = _metric_names(metrics)
    _check_options(context, locals(), names, len(hypotheses or ()))
    reference_lines = [_lines(path) for path in references]
    systems = (
        {str(path): _lines(path) for path in hypotheses} if hypotheses else {STANDARD_INPUT: _lines(None)}
    )
    if hypotheses and len(systems) < len(hypotheses):
        raise InputError("a file of hypotheses is given twice; give each system once")
    for path, lines in zip(references[1:], reference_lines[1:], strict=True):
        _check_counts(str(path), lines, str(references[0]), reference_lines[0])
    for name, lines in systems.items():
        _check_counts(name, lines, str(references[0]), reference_lines[0])
    if tokenize is None and "bleu" in names:
        suffix = references[0].name.removesuffix(".gz").rpartition(".")[2]
        tokenize, note = tokenizer_of(suffix if language is None else language)
        if note:
            notice(note)
    judges = {
        name: make_metric(name, reference_lines, tokenize=tokenize, lowercase=lowercase) for name in names
    }
    if len(systems) > 1:
        with status_line() as say:
            say(f"comparing {len(systems)} systems on {samples:,} resampled test sets: {', '.join(judges)}")
            outcome = paired_bootstrap(systems, judges, samples)
        tables = [{**each._asdict(), "systems": [row._asdict() for row in each.systems]} for each in outcome]
        print(_as_json(tables) if as_json else _comparison_text(outcome, width))
        return
    (lines,) = systems.values()
    scores = _scores(judges, lines, width)
    if as_json:
        print(_as_json([score._asdict() for score in scores]))
    else:
        print("\n".join(score.text for score in scores))


def _check_options(
    context: typer.Context, given: Mapping[str, Any], names: Sequence[str], systems: int
) -> None:
    """Refuse options that would change nothing, and a language that is none."""
    if "bleu" not in names:
        refuse_idle(context, "is of BLEU, which --metrics does not name", "tokenize", "language")
    if given["tokenize"] is not None:
        refuse_idle(context, "chooses a tokenizer, and --tokenize names one; give one of them", "language")
    if names == ["ter"]:
        refuse_idle(context, "is of BLEU and chrF, which --metrics does not name", "lowercase")
    if given["as_json"]:
        refuse_idle(context, "is of text; figures of --json are not rounded", "width")
    if systems < 2:
        refuse_idle(context, "is for the comparison of systems; give --hypotheses several times", "samples")
    language = given["language"]
    if language is not None and not re.fullmatch("[A-Za-z]{2,8}([._-][A-Za-z0-9]{1,8})*", language):
        raise InputError(
            f"--language '{language[:40]}': give the code of a language, such as de, zh or pt_BR"
        )


def _scores(judges: Mapping[str, Metric], lines: Sequence[str], width: int) -> list[Score]:
    scores = []
    with status_line() as say:
        for number, (name, judge) in enumerate(judges.items(), 1):
            say(f"metric {number} of {len(judges)}: {name}, {len(lines):,} lines")
            scores.append(corpus_score(judge, lines, width=width))
    return scores


def _as_json(tables: Sequence[dict[str, Any]]) -> str:
    return json_text(tables, indent=2)


def _metric_names(given: Sequence[str] | None) -> list[str]:
    names = [name for text in given or () for name in text.replace(",", " ").split()]
    if given and not names:
        raise InputError(
            f"--metrics '{given[0]}': names no metric; give {', '.join(METRICS)}, or leave it out"
        )
    return list(dict.fromkeys(name.lower() for name in names)) or list(METRICS)


def _lines(path: Path | None) -> list[str]:
    if path is not None:
        lines = list(read_lines(path))
    else:
        lines = [line for chunk in read_chunks(standard_input(), 1 << 16) for line in chunk]
    where = STANDARD_INPUT if path is None else path
    if not lines:
        raise InputError(f"{where}: no translations to judge; give --hypotheses FILE or pipe them in")
    for number, line in enumerate(lines, 1):
        if len(line) > limits.JUDGED:
            raise InputError(
                f"{where}:{number}: {len(line):,} characters, and at most {limits.JUDGED:,} are compared; give a "
                "sentence a line"
            )
    return lines


def _check_counts(name: str, lines: Sequence[str], other: str, other_lines: Sequence[str]) -> None:
    if len(lines) != len(other_lines):
        raise InputError(
            f"{name} has {len(lines)} lines but {other} has {len(other_lines)}; line n of one must belong to line n of "
            "the other"
        )


def _comparison_text(outcome: Sequence[Significance], width: int) -> str:
    """For each metric its signature and a row a system; the first is what the others are compared with."""
    lines = []
    for each in outcome:
        lines.append(f"{each.name}|{each.signature}")
        longest = max(len(printable(system.system)) for system in each.systems)
        for system in each.systems:
            spread = f"({system.mean:.{width}f} +- {system.interval:.{width}f})"
            row = f"  {printable(system.system):<{longest}}  {system.value:.{width}f}  {spread}  "
            if system.p_value is None:
                row += "baseline"
            else:
                verdict = {True: "better", False: "worse", None: "equal"}[system.better]
                sure = ", significant at 0.05" if system.p_value < 0.05 else ""
                row += f"p = {system.p_value:.4f}  {verdict}{sure}"
            lines.append(row)
    return "\n".join(lines)
