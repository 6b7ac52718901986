"""Measures constrained search: satisfied phrases and time.

    python -m scripts.bench constraints runs/multi30k test.en test.de --constraints 1 3

Constraints are phrases of one or more words drawn from the references that do not overlap. They are satisfied if the
text has them as whole words that do not overlap. Search with and without constraints runs in turns in one process.
"""

from __future__ import annotations

import re
import time
from itertools import islice
from pathlib import Path
from random import Random

import sacrebleu

import econmt
from econmt.data.text.corpus import read_lines
from econmt.data.text.vocabulary import UNK, Vocabulary
from scripts.bench.arguments import parser_of


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


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("model", help="model folder")
    add("source", type=Path, help="text to translate")
    add("reference", type=Path, help="its translation")
    add("--constraints", type=int, nargs=2, default=(1, 3), help="least and most constraints of a sentence")
    add("--words", type=int, nargs=2, default=(1, 2), help="least and most words of a constraint")
    add("--beams", type=int, nargs="+", default=[5], help="beam sizes")
    add("--lines", type=int, default=1000, help="lines of the text (%(default)s)")
    add("--turns", type=int, default=3, help="searches of each kind (%(default)s)")
    given = parser.parse_args()
    sources, references = (
        list(islice(read_lines(path), given.lines)) for path in (given.source, given.reference)
    )
    model = econmt.load(given.model, device="cpu", precision="float32", threads=1)
    draw, target = Random(1), model.vocabularies.target
    wanted = [phrases(draw, text, given.constraints, given.words, target) for text in references]
    requests = [econmt.Request(text, each) for text, each in zip(sources, wanted, strict=True)]
    print(f"{sum(map(len, wanted))} constraints for {len(sources)} sentences")
    print(
        "| beam | satisfied: plain | constrained | BLEU: plain | constrained | seconds: plain | constrained | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for beam in given.beams:
        seconds = [0.0, 0.0]
        texts: list[list[str]] = [[], []]
        for turn in range(given.turns):
            for kind in (0, 1) if turn % 2 == 0 else (1, 0):
                begun = time.perf_counter()
                translations = model.translate(requests if kind else sources, beam_size=beam, attention=False)
                seconds[kind] += time.perf_counter() - begun
                texts[kind] = [each.text for each in translations]
        satisfied = [sum(map(holds, each, wanted)) for each in texts]
        bleu = [sacrebleu.corpus_bleu(each, [references]).score for each in texts]
        print(
            f"| {beam} | {satisfied[0]} of {len(wanted)} | {satisfied[1]} | {bleu[0]:.1f} | {bleu[1]:.1f} | "
            f"{seconds[0] / given.turns:.1f} | {seconds[1] / given.turns:.1f} | {seconds[1] / seconds[0]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
