"""``econmt evaluate``: computes BLEU, chrF and TER of translations, and compares systems."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sacrebleu.metrics.base import Metric

from econmt.cli.computing import line_chunks
from econmt.config import limits
from econmt.config.json_reader import json_text
from econmt.data.files import notice
from econmt.data.progress_bars import status_line
from econmt.decoding.streams import STANDARD_INPUT
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
from econmt.options.option_groups import option


@dataclass(frozen=True)
class MetricChoice:
    """Metrics and their settings."""

    metrics: list[str] | None = option(
        None,
        help="Metrics bleu, chrf, ter: repeat the option or separate them with commas.",
        show_default="all",
    )
    tokenize: str | None = option(
        None,
        help="sacreBLEU's name of the tokenizer for BLEU; none for text that is already tokenised.",
        show_default="by the target language",
    )
    language: str | None = option(
        None,
        "--language",
        "-l",
        help="Target language, which chooses BLEU's tokenizer: zh, ja, ko, th, ...",
        show_default="the suffix of the first reference",
    )
    lowercase: bool = option(False, help="Ignore case in BLEU and chrF.")

    @property
    def names(self) -> list[str]:
        """Names of the metrics."""
        names = [name for text in self.metrics or () for name in text.replace(",", " ").split()]
        if self.metrics and not names:
            raise InputError(
                f"--metrics '{self.metrics[0]}': names no metric; give {', '.join(METRICS)}, or leave it out"
            )
        return list(dict.fromkeys(name.lower() for name in names)) or list(METRICS)

    def __post_init__(self) -> None:
        code = self.language or "en"
        if not re.fullmatch("[A-Za-z]{2,8}([._-][A-Za-z0-9]{1,8})*", code):
            raise InputError(
                f"--language '{code[:40]}': give the code of a language, such as de, zh or pt_BR"
            )

    def scorers(self, reference: Path, lines: Sequence[Sequence[str]]) -> dict[str, Metric]:
        """Returns a scorer for each metric by the lines of each reference; the first file's suffix is the language."""
        tokenizer = self.tokenize
        if tokenizer is None and "bleu" in self.names:
            suffix = reference.name.removesuffix(".gz").rpartition(".")[2]
            tokenizer, note = tokenizer_of(suffix if self.language is None else self.language)
            if note:
                notice(note)
        return {
            name: make_metric(name, lines, tokenize=tokenizer, lowercase=self.lowercase)
            for name in self.names
        }


def evaluate(
    references: list[Path] = option(
        ...,
        "--references",
        "-r",
        help="Reference translations; may be repeated for several references of each sentence.",
    ),
    *,
    hypotheses: list[Path] | None = option(
        None,
        "--hypotheses",
        "-i",
        help="Translations to evaluate; further systems are compared with the first.",
        show_default="standard input",
    ),
    choice: MetricChoice,
    width: int = option(2, "--width", "-w", help="Digits after the decimal point.", min=0, max=limits.DIGITS),
    samples: int = option(
        1000, help="Number of resampled test sets for comparing systems.", min=1, max=limits.SAMPLES
    ),
    as_json: bool = option(False, "--json", help="Print JSON with unrounded figures."),
) -> None:
    """Print BLEU, chrF and TER with sacreBLEU and its signatures; compare systems by paired bootstrap resampling.

    \b
    Example:
      econmt translate -m runs/multi30k -i test.en | econmt evaluate -r test.de
      econmt evaluate -r test.de -i baseline.de -i new.de --metrics bleu
    """
    reference_lines = [_lines(path) for path in references]
    files: Sequence[Path | None] = hypotheses or [None]
    systems = {STANDARD_INPUT if path is None else str(path): _lines(path) for path in files}
    if hypotheses and len(systems) < len(hypotheses):
        raise InputError("a file of hypotheses is given twice; give each system once")
    texts = [*zip(map(str, references), reference_lines, strict=True), *systems.items()]
    count = len(reference_lines[0])
    for name, lines in texts:
        if len(lines) != count:
            raise InputError(
                f"{name} has {len(lines)} lines but {references[0]} has {count}; line n of one must belong to line n "
                "of the other"
            )
    scorers = choice.scorers(references[0], reference_lines)
    if len(systems) > 1:
        with status_line() as say:
            say(f"comparing {len(systems)} systems on {samples:,} resampled test sets: {', '.join(scorers)}")
            outcome = paired_bootstrap(systems, scorers, samples)
        tables = [{**each._asdict(), "systems": [row._asdict() for row in each.systems]} for each in outcome]
        print(json_text(tables, indent=2) if as_json else _comparison_text(outcome, width))
        return
    (lines,) = systems.values()
    scores = _scores(scorers, lines, width)
    if as_json:
        print(json_text([score._asdict() for score in scores], indent=2))
    else:
        print("\n".join(score.text for score in scores))


def _scores(scorers: Mapping[str, Metric], lines: Sequence[str], width: int) -> list[Score]:
    scores = []
    with status_line() as say:
        for number, (name, scorer) in enumerate(scorers.items(), 1):
            say(f"metric {number} of {len(scorers)}: {name}, {len(lines):,} lines")
            scores.append(corpus_score(scorer, lines, width=width))
    return scores


def _lines(path: Path | None) -> list[str]:
    lines = [line for chunk in line_chunks(path, 1 << 16) for line in chunk]
    where = STANDARD_INPUT if path is None else path
    if not lines:
        raise InputError(f"{where}: no lines to evaluate; give --hypotheses FILE or pipe them in")
    for number, line in enumerate(lines, 1):
        if len(line) > limits.JUDGED:
            raise InputError(
                f"{where}:{number}: {len(line):,} characters, more than the {limits.JUDGED:,} that are compared; give "
                "one sentence per line"
            )
    return lines


def _comparison_text(outcome: Sequence[Significance], width: int) -> str:
    """Formats comparisons: the signature of each metric, and a row for each system; the first is the baseline."""
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
