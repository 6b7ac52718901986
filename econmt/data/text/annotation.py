"""Annotation of source sentences with the translations that their terms must have.

Each term is replaced by its translation between two tags (train-by-replace of Dinu et al., 2019, "Training neural
machine translation to apply terminology constraints"; tags instead of factors as in Ailem et al., 2021)::

    The <term> Kraftwagen </term> is fast.

The tags are entries of the vocabulary, so that every model, search and export treats them as any other token. A model
learns their meaning from a share of its training pairs, in which words of the source are annotated with those words of
the target that translate them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from econmt.data.text.case import folded
from econmt.data.text.glossary import Glossary, Occurrence, unit_spans, units
from econmt.data.text.lexicon import learn_lexicon
from econmt.data.text.subwords import TERM_TAGS, sample_pairs
from econmt.data.text.vocabulary import SPECIAL_TOKENS, WORD_START, Vocabulary

MOST_TERMS = 3
"""Maximum number of annotated terms of a training pair."""

_LONGER = 0.3
"""Probability of extending a training pair's term by the next word, if that is aligned with the next target word."""
_MOST_WORDS = 3
_SAMPLE_PAIRS = 100_000
_FREQUENT = 0.001
"""Share of a text above which a word is no term: most such words are articles, pronouns and the like."""
_ALWAYS_RARE = 20
_KEPT = 2
"""Number of likely translations of a word, among which an aligned word is."""


def term_tag_ids(vocabulary: Vocabulary) -> list[int]:
    """Returns the ids of the tags of annotated terms; none if a source vocabulary lacks one of them."""
    ids = vocabulary.encode(" ".join(TERM_TAGS))
    return ids if vocabulary.tokens(ids) == [f"{WORD_START}{tag}" for tag in TERM_TAGS] else []


class Annotation(NamedTuple):
    """Annotated sentence.

    Attributes:
        text: the sentence with annotated terms.
        origins: for each character of ``text`` the characters of the sentence that it stands for, first and end; those
            of tags and translations stand for the term.
        spans: characters of ``text`` of each annotated term, tags included.
    """

    text: str
    origins: list[tuple[int, int]]
    spans: list[tuple[int, int]]


def annotate(text: str, terms: Sequence[Occurrence]) -> Annotation:
    """Annotates a normalised sentence with its terms, which are in order."""
    begin, end = TERM_TAGS
    pieces, origins, spans = list[str](), list[tuple[int, int]](), list[tuple[int, int]]()

    def copy(start: int, stop: int) -> None:
        pieces.append(text[start:stop])
        origins.extend((at, at + 1) for at in range(start, stop))

    def insert(new: str, term: tuple[int, int]) -> None:
        pieces.append(new)
        origins.extend([term] * len(new))

    done = 0
    for target, start, stop in terms:
        copy(done, done + len(text[done:start].rstrip(" ")))
        first = len(origins)
        insert(f" {begin} " if first else f"{begin} ", (start, stop))
        insert(f"{target} {end}", (start, stop))
        spans.append((first, len(origins)))
        done = stop
    copy(done, len(text))
    return Annotation("".join(pieces), origins, spans)


class Terms(Protocol):
    """Finder of terms in training pairs."""

    def of(self, source: str, target: str, draw: random.Random) -> list[Occurrence]:
        """Returns terms of a normalised source with their translations in the target, in order."""


class GlossaryTerms(Terms):
    """Terms of a glossary whose translations are in the target; ``language`` is the source language."""

    def __init__(self, glossary: Glossary, language: str = "") -> None:
        self._glossary, self._language = glossary, language

    def of(self, source: str, target: str, draw: random.Random) -> list[Occurrence]:  # noqa: ARG002
        """Returns all terms."""
        words = units(target)
        found = []
        for each in self._glossary.occurrences(source, self._language):
            wanted = units(each.target)
            if any(words[at : at + len(wanted)] == wanted for at in range(len(words) - len(wanted) + 1)):
                found.append(each)
        return found


class AlignedTerms(Terms):
    """Words and short phrases that are aligned one to one by IBM model 1 in both directions.

    ``pairs_factory`` returns an iterator over the training pairs, and is called twice; ``languages`` are those of
    source and target.
    """

    def __init__(
        self, pairs_factory: Callable[[], Iterator[tuple[str, str]]], languages: tuple[str, str] = ("", "")
    ) -> None:
        self._languages = languages
        count = sum(1 for _ in pairs_factory())
        rows = [
            tuple(
                [folded(unit, language) for unit in units(text)]
                for text, language in zip(pair, languages, strict=True)
            )
            for pair in sample_pairs(pairs_factory(), count, _SAMPLE_PAIRS)
        ]
        self._counts = tuple(Counter(word for row in rows for word in row[side]) for side in (0, 1))
        self._most = [max(_ALWAYS_RARE, _FREQUENT * counts.total()) for counts in self._counts]
        names = [[*SPECIAL_TOKENS, *counts] for counts in self._counts]
        numbers = [{word: number for number, word in enumerate(words)} for words in names]
        pairs = [
            ([numbers[0][word] for word in source], [numbers[1][word] for word in target])
            for source, target in rows
        ]
        there = learn_lexicon(pairs, (len(names[0]), len(names[1])), _KEPT)
        back = learn_lexicon(
            [(target, source) for source, target in pairs], (len(names[1]), len(names[0])), _KEPT
        )
        mutual = (back[there.clip(0)] == np.arange(len(there))[:, None, None]).any(axis=2) & (there > 0)
        self._translations = {
            names[0][source]: frozenset(names[1][target] for target in there[source][mutual[source]].tolist())
            for source in np.flatnonzero(mutual.any(axis=1)).tolist()
        }

    def of(self, source: str, target: str, draw: random.Random) -> list[Occurrence]:
        """Draws at most ``MOST_TERMS`` terms that do not overlap."""
        spans = [unit_spans(text) for text in (source, target)]
        words = [
            [folded(text[start:end], language) for start, end in each]
            for text, each, language in zip((source, target), spans, self._languages, strict=True)
        ]
        aligned = self._alignment(*words)
        starts = [at for at, other in aligned.items() if self._is_term(words[0][at], words[1][other])]
        draw.shuffle(starts)
        found, taken = list[Occurrence](), set[int]()
        for at in starts[: draw.randint(1, MOST_TERMS)]:
            size = 1
            while (
                size < _MOST_WORDS
                and aligned.get(at + size) == aligned[at] + size
                and words[0][at + size][0].isalpha()
                and words[1][aligned[at] + size][0].isalpha()
                and draw.random() < _LONGER
            ):
                size += 1
            covered = set(range(at, at + size))
            if covered & taken:
                continue
            taken |= covered
            first, last = aligned[at], aligned[at] + size - 1
            phrase = target[spans[1][first][0] : spans[1][last][1]]
            found.append(Occurrence(phrase, spans[0][at][0], spans[0][at + size - 1][1]))
        return sorted(found, key=lambda each: each.start)

    def _alignment(self, source: Sequence[str], target: Sequence[str]) -> dict[int, int]:
        """Returns the target positions of source positions that are aligned one to one."""
        links = [
            (at, other)
            for at, word in enumerate(source)
            for other, translation in enumerate(target)
            if translation in self._translations.get(word, ())
        ]
        counts = [Counter(link[side] for link in links) for side in (0, 1)]
        return {at: other for at, other in links if counts[0][at] == 1 and counts[1][other] == 1}

    def _is_term(self, source: str, target: str) -> bool:
        """Returns True if two words are neither frequent nor single occurrences, and begin with letters."""
        return all(
            1 < self._counts[side][word] <= self._most[side] and word[0].isalpha()
            for side, word in enumerate((source, target))
        )


def draw_terms(terms: Terms, share: float, number: int, pair: tuple[str, str], tag: str) -> list[Occurrence]:
    """Draws the terms of a training pair to annotate; none with a probability of 1 - ``share``.

    Args:
        terms: finder of terms.
        number: number of the pair in the training text, which the draw depends on.
        pair: normalised source and target. tag: tag at the beginning of the source, which no term overlaps.
    """
    draw = random.Random(number)
    if draw.random() >= share:
        return []
    found = [each for each in terms.of(*pair, draw) if each.start >= len(tag)]
    kept = sorted(draw.sample(range(len(found)), min(MOST_TERMS, len(found))))
    return [found[at] for at in kept]
