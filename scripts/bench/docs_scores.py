"""Measures chrF and BLEU of translations by direction.

python -m scripts.bench docs-scores docs-ten/test-all runs/docs-ten/hypotheses.test
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from econmt.bench.rows import Row
from econmt.data.text.corpus import read_lines
from econmt.errors import InputError
from econmt.evaluation.metrics import corpus_score, make_metric, tokenizer_of
from scripts.bench.frame import Bench


def scores(prefix: Path, hypotheses: Path) -> Iterator[Row]:
    """Yields chrF and BLEU by source language, with a column for each target language and their mean.

    Args:
        prefix: name of the files .trg and .directions. hypotheses: translations of .src.
    """
    lines = [
        list(read_lines(path)) for path in (Path(f"{prefix}.directions"), Path(f"{prefix}.trg"), hypotheses)
    ]
    if len({*map(len, lines)}) > 1:
        raise InputError(f"{hypotheses}: has {len(lines[2]):,} lines, but {prefix}.trg has {len(lines[1]):,}")
    by_direction: dict[str, tuple[list[str], list[str]]] = {}
    for direction, reference, hypothesis in zip(*lines, strict=True):
        both = by_direction.setdefault(direction, ([], []))
        both[0].append(reference)
        both[1].append(hypothesis)
    languages = dict.fromkeys(direction.partition("-")[0] for direction in by_direction)
    for name in ("chrf", "bleu"):
        means = []
        for source in languages:
            row: Row = {"metric": name, "from": source, **dict.fromkeys(languages, "")}
            for target in (each for each in languages if each != source):
                references, translations = by_direction[f"{source}-{target}"]
                tokenize = tokenizer_of(target).name if name == "bleu" else None
                metric = make_metric(name, [references], tokenize=tokenize)
                row[target] = round(corpus_score(metric, translations).value, 1)
                means.append(float(row[target]))
            yield row
        mean = round(statistics.mean(means), 1)
        yield {"metric": name, "from": "mean", **dict.fromkeys(languages, ""), "all": mean}


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__)
    bench.add_argument("prefix", type=Path, help="prefix of the files .trg and .directions")
    bench.add_argument("hypotheses", type=Path, help="translations of PREFIX.src, one a line")
    given = bench.begin(words)
    bench.report(scores(given.prefix, given.hypotheses), "translations of all directions")
