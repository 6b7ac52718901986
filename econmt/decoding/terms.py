"""Terms of a glossary in sources: the tokens that they cover, and annotated sources.

Shapes: O tokens of a sentence, S tokens of the annotated sentence, both without EOS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.data.text.annotation import Annotation, annotate
from econmt.data.text.glossary import Occurrence
from econmt.data.text.vocabulary import WORD_START, Vocabulary, normalized
from econmt.decoding.search.beam import Hypothesis

_BLANK = (" ", WORD_START)


class TokenOwners(NamedTuple):
    """Tokens of a text by character.

    Attributes:
        owners: index of the token of each character, -1 for blanks.
        size: number of tokens.
    """

    owners: list[int]
    size: int

    def of(self, start: int, end: int) -> tuple[int, ...]:
        """Returns the tokens of the characters from ``start`` to ``end``."""
        return tuple(sorted({owner for owner in self.owners[start:end] if owner >= 0}))


def token_owners(text: str, vocabulary: Vocabulary) -> TokenOwners:
    """Returns the tokens of a normalised text by character."""
    tokens = vocabulary.written(text)
    owners = iter([number for number, token in enumerate(tokens) for sign in token if sign not in _BLANK])
    return TokenOwners([-1 if sign in _BLANK else next(owners, -1) for sign in text], len(tokens))


class SourceTerms(NamedTuple):
    """A source with its terms.

    Attributes:
        text: text to translate, annotated or not.
        terms: the terms.
        spans: source positions of each term; none if they are unknown.
        spans_of_sentence: the same in the sentence itself, if the source is annotated.
        attention: (S + 1, O + 1) weights that turn attention over an annotated source into attention over the sentence;
            None if the source is not annotated.
    """

    text: str
    terms: Sequence[Occurrence] = ()
    spans: Sequence[tuple[int, ...]] = ()
    spans_of_sentence: Sequence[tuple[int, ...]] = ()
    attention: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens of an annotated source, S."""
        assert self.attention is not None
        return len(self.attention) - 1

    def of_sentence(self, hypothesis: Hypothesis) -> Hypothesis:
        """Returns a hypothesis for an annotated source with its attention over the sentence itself."""
        if hypothesis.attention is None or self.attention is None:
            return hypothesis
        return hypothesis._replace(attention=hypothesis.attention @ self.attention)


def plain_source(text: str, terms: Sequence[Occurrence], vocabulary: Vocabulary, most: int) -> SourceTerms:
    """Returns a source as it is, with the positions of its terms, those after the first ``most`` tokens left out."""
    owners = token_owners(normalized(text), vocabulary)
    spans = [(each, owners.of(each.start, each.end)) for each in terms if each.end <= len(owners.owners)]
    kept = [(term, span) for term, span in spans if all(at < most for at in span)]
    return SourceTerms(text, [term for term, _ in kept], [span for _, span in kept])


def annotated_source(text: str, terms: Sequence[Occurrence], vocabulary: Vocabulary) -> SourceTerms:
    """Returns a source annotated with its terms."""
    sentence = normalized(text)
    annotation = annotate(sentence, terms)
    owners = token_owners(annotation.text, vocabulary)
    originals = token_owners(sentence, vocabulary)
    return SourceTerms(
        annotation.text,
        terms,
        [owners.of(*span) for span in annotation.spans],
        [originals.of(each.start, each.end) for each in terms],
        _attention_weights(annotation, owners, originals),
    )


def _attention_weights(annotation: Annotation, annotated: TokenOwners, sentence: TokenOwners) -> Tensor:
    weights = torch.zeros(annotated.size + 1, sentence.size + 1)
    for owner, origin in zip(annotated.owners, annotation.origins, strict=True):
        originals = sentence.of(*origin)
        if owner >= 0 and originals:
            weights[owner, list(originals)] += 1.0 / len(originals)
    weights[-1, -1] = 1.0
    for row in range(annotated.size - 1, -1, -1):
        if not weights[row].any():  # a token that is a blank belongs to the next one
            weights[row] = weights[row + 1]
    return weights / weights.sum(dim=1, keepdim=True)
