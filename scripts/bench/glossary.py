"""Measures terms of glossaries in translations, and BLEU.

    python -m scripts.bench glossary runs/tatoeba-en-de tatoeba-en-de/train tatoeba-en-de/test

Terms are words of the test sources, with the words of the references that word alignment of the training text pairs
with them, one or two a sentence. BLEU rises if they are put in the right places. Each sentence has a glossary of its
own terms.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import NamedTuple

import sacrebleu

import econmt
from econmt.bench.rows import Row
from econmt.data.text.annotation import AlignedTerms, term_tag_ids
from econmt.data.text.corpus import find_corpus, read_pairs, search_path
from econmt.data.text.glossary import Glossary, units
from econmt.data.text.vocabulary import normalized
from scripts.bench.frame import Bench

MOST_TERMS = 2


class Sentence(NamedTuple):
    """Test sentence with its reference and its terms, each with its translation."""

    source: str
    reference: str
    terms: list[tuple[str, str]]


def chosen_sentences(terms: AlignedTerms, pairs: Sequence[tuple[str, str]], count: int) -> list[Sentence]:
    """Returns the first test sentences that have terms."""
    rows = list[Sentence]()
    for number, pair in enumerate(pairs):
        source, reference = map(normalized, pair)
        draw = random.Random(number)
        found = terms.of(source, reference, draw)
        picked = draw.sample(found, min(MOST_TERMS, len(found)))
        if picked:
            rows.append(
                Sentence(source, reference, [(source[each.start : each.end], each.target) for each in picked])
            )
        if len(rows) == count:
            break
    return rows


def holds(text: str, phrase: str) -> bool:
    """Returns True if a text has a phrase as whole words."""
    words, wanted = units(text), units(phrase)
    return any(words[at : at + len(wanted)] == wanted for at in range(len(words) - len(wanted) + 1))


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__)
    add = bench.add_argument
    add("model", help="model folder")
    add("train", help="training text, named as in data.train, on which words are aligned")
    add("test", help="test text, named as in data.test")
    add("--lines", type=int, default=500, help="test sentences with terms (%(default)s)")
    add("--beams", type=int, nargs="+", default=[5], help="beam sizes")
    given = bench.begin(words)
    model = econmt.load(given.model, device="cpu", precision="float32", threads=1)
    data = model.recipe.pairs
    train, test = (
        find_corpus(name, data.source, data.target, search_path(None, None), False)
        for name in (given.train, given.test)
    )
    sentences = chosen_sentences(
        AlignedTerms(lambda: read_pairs(train)), list(islice(read_pairs(test), 20 * given.lines)), given.lines
    )
    count = sum(len(each.terms) for each in sentences)
    print(f"{count} terms in {len(sentences)} sentences")
    glossaries = [econmt.Request(each.source, glossary=Glossary(dict(each.terms))) for each in sentences]
    constrained = [econmt.Request(each.source, [target for _, target in each.terms]) for each in sentences]
    kinds: dict[str, tuple[list[econmt.Request], dict[str, str]]] = {
        "none": ([econmt.Request(each.source) for each in sentences], {}),
        "constraints without anchors": (constrained, {}),
        "constrain": (glossaries, {"glossary_mode": "constrain"}),
    }
    if term_tag_ids(model.vocabularies.source):
        kinds |= {mode: (glossaries, {"glossary_mode": mode}) for mode in ("annotate", "auto")}
    references = [[each.reference for each in sentences]]

    def rows() -> Iterator[Row]:
        for beam, (name, (requests, options)) in product(given.beams, kinds.items()):
            begun = time.perf_counter()
            found = model.translate(requests, beam_size=beam, attention=False, **options)
            seconds = time.perf_counter() - begun
            texts = [each.text for each in found]
            present = sum(
                holds(text, term) for text, row in zip(texts, sentences, strict=True) for _, term in row.terms
            )
            yield {
                "glossary": name,
                "beam": beam,
                "terms present": f"{100 * present / count:.1f} %",
                "BLEU": f"{sacrebleu.corpus_bleu(texts, references).score:.1f}",
                "chrF": f"{sacrebleu.corpus_chrf(texts, references).score:.1f}",
                "s": f"{seconds:.1f}",
            }

    bench.report(rows())
