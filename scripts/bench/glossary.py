"""Measures terms of glossaries in translations, and BLEU.

    python -m scripts.bench glossary runs/tatoeba-en-de tatoeba-en-de/train tatoeba-en-de/test

Terms are words of the test sources, with the words of the references that word alignment of the training text pairs
with them, one or two a sentence. BLEU rises if they are put in the right places. Each sentence has a glossary of its
own terms.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import sacrebleu

import econmt
from econmt.data.text.annotation import AlignedTerms, term_tag_ids
from econmt.data.text.corpus import find_corpus, read_pairs, search_path
from econmt.data.text.glossary import Glossary, units
from econmt.data.text.vocabulary import normalized
from scripts.bench.arguments import parser_of

MOST_TERMS = 2


class Row(NamedTuple):
    """Test sentence with its reference and its terms, each with its translation."""

    source: str
    reference: str
    terms: list[tuple[str, str]]


def chosen_rows(terms: AlignedTerms, pairs: Sequence[tuple[str, str]], count: int) -> list[Row]:
    """Returns the first test sentences that have terms."""
    rows = list[Row]()
    for number, pair in enumerate(pairs):
        source, reference = map(normalized, pair)
        draw = random.Random(number)
        found = terms.of(source, reference, draw)
        picked = draw.sample(found, min(MOST_TERMS, len(found)))
        if picked:
            rows.append(
                Row(source, reference, [(source[each.start : each.end], each.target) for each in picked])
            )
        if len(rows) == count:
            break
    return rows


def holds(text: str, phrase: str) -> bool:
    """Returns True if a text has a phrase as whole words."""
    words, wanted = units(text), units(phrase)
    return any(words[at : at + len(wanted)] == wanted for at in range(len(words) - len(wanted) + 1))


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("model", help="model folder")
    add("train", help="training text, named as in data.train, on which words are aligned")
    add("test", help="test text, named as in data.test")
    add("--lines", type=int, default=500, help="test sentences with terms (%(default)s)")
    add("--beams", type=int, nargs="+", default=[5], help="beam sizes")
    given = parser.parse_args()
    model = econmt.load(given.model, device="cpu", precision="float32", threads=1)
    data = model.recipe.pairs
    train, test = (
        find_corpus(name, data.source, data.target, search_path(None, None), False)
        for name in (given.train, given.test)
    )
    rows = chosen_rows(
        AlignedTerms(lambda: read_pairs(train)), list(islice(read_pairs(test), 20 * given.lines)), given.lines
    )
    count = sum(len(row.terms) for row in rows)
    print(f"{count} terms in {len(rows)} sentences")
    print("| glossary | beam | terms present | BLEU | chrF | s |")
    print("|---|---|---|---|---|---|")
    with_glossary = [econmt.Request(row.source, glossary=Glossary(dict(row.terms))) for row in rows]
    kinds: dict[str, tuple[list[econmt.Request], dict[str, str]]] = {
        "none": ([econmt.Request(row.source) for row in rows], {}),
        "constraints without anchors": (
            [econmt.Request(row.source, [target for _, target in row.terms]) for row in rows],
            {},
        ),
        "constrain": (with_glossary, {"glossary_mode": "constrain"}),
    }
    if term_tag_ids(model.vocabularies.source):
        kinds["annotate"] = with_glossary, {"glossary_mode": "annotate"}
        kinds["auto"] = with_glossary, {"glossary_mode": "auto"}
    references = [[row.reference for row in rows]]
    for beam in given.beams:
        for name, (requests, options) in kinds.items():
            begun = time.perf_counter()
            texts = [
                each.text for each in model.translate(requests, beam_size=beam, attention=False, **options)
            ]
            seconds = time.perf_counter() - begun
            present = sum(
                holds(text, term) for text, row in zip(texts, rows, strict=True) for _, term in row.terms
            )
            bleu, chrf = sacrebleu.corpus_bleu(texts, references), sacrebleu.corpus_chrf(texts, references)
            figures = f"{100 * present / count:.1f} % | {bleu.score:.1f} | {chrf.score:.1f} | {seconds:.1f}"
            print(f"| {name} | {beam} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
