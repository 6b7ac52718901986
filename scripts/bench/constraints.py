"""Measures constrained search: satisfied phrases and time.

    python -m scripts.bench constraints runs/multi30k test.en test.de --constraints 1 3

Constraints are phrases of one or more words drawn from the references that do not overlap. They are satisfied if the
text has them as whole words that do not overlap. Search with and without constraints runs in turns in one process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

import sacrebleu

import econmt
from econmt.bench.rows import Row
from econmt.data.text.corpus import read_lines
from econmt.data.text.vocabulary import UNK, Vocabulary
from scripts.bench.frame import CPU, Bench, in_turns, ratio_of


def phrases(
    draw: Random, reference: str, count: tuple[int, int], size: tuple[int, int], target: Vocabulary
) -> list[str]:
    """Draws phrases of a reference that do not overlap and that the vocabulary can write, if there are any."""
    words, taken = reference.split(), set[int]()
    chosen = list[str]()
    wanted = draw.randint(*count)
    for _ in range(50):
        length = min(draw.randint(*size), len(words))
        at = draw.randrange(len(words) - length + 1)
        phrase = " ".join(words[at : at + length]).strip('.,;:!?"')
        positions = set(range(at, at + length))
        if len(chosen) < wanted and phrase and not taken & positions and UNK not in target.encode(phrase):
            taken |= positions
            chosen.append(phrase)
    return chosen


def holds(text: str, wanted: list[str]) -> bool:
    """Returns True if a text contains all phrases as whole words that do not overlap."""
    if not wanted:
        return True
    first, *rest = wanted
    before = r"(?<!\w)" if first[0].isalnum() else ""
    after = r"(?!\w)" if first[-1].isalnum() else ""
    return any(
        holds(f"{text[: match.start()]}\0{text[match.end() :]}", rest)
        for match in re.finditer(before + re.escape(first) + after, text)
    )


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, turns=3)
    add = bench.add_argument
    add("model", help="model folder")
    add("source", type=Path, help="text to translate")
    add("reference", type=Path, help="its translation")
    add("--constraints", type=int, nargs=2, default=(1, 3), help="least and most constraints of a sentence")
    add("--words", type=int, nargs=2, default=(1, 2), help="least and most words of a constraint")
    add("--beams", type=int, nargs="+", default=[5], help="beam sizes")
    add("--lines", type=int, default=1000, help="lines of the text (%(default)s)")
    given = bench.begin(words)
    sources, references = (
        list(islice(read_lines(path), given.lines)) for path in (given.source, given.reference)
    )
    model = econmt.load(given.model, device="cpu", precision="float32", threads=1)
    draw, target = Random(1), model.vocabularies.target
    wanted = [phrases(draw, text, given.constraints, given.words, target) for text in references]
    requests = [econmt.Request(text, each) for text, each in zip(sources, wanted, strict=True)]
    print(f"{sum(map(len, wanted))} constraints for {len(sources)} sentences")

    def rows() -> Iterator[Row]:
        for beam in given.beams:
            found: dict[str, list[str]] = {}

            def search(kind: str, beam: int = beam, found: dict[str, list[str]] = found) -> None:
                texts = requests if kind == "constrained" else sources
                found[kind] = [each.text for each in model.translate(texts, beam_size=beam, attention=False)]

            calls = {kind: partial(search, kind) for kind in ("plain", "constrained")}
            timings = in_turns(calls, CPU, turns=given.turns)
            row: Row = {"beam": beam, "sentences": len(wanted)}
            for kind, texts in found.items():
                row[f"satisfied, {kind}"] = sum(map(holds, texts, wanted))
                row[f"BLEU, {kind}"] = round(sacrebleu.corpus_bleu(texts, [references]).score, 1)
                row[f"seconds, {kind}"] = timings[kind].median
            yield row | {"ratio": str(ratio_of(timings["constrained"].samples, timings["plain"].samples))}

    bench.report(rows())
