"""Alignments between source words and translated words, read from the attention.

Shapes: T target tokens, S source tokens, none of them the end of a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from econmt.data.text.subwords import (
    UNK,
    SentencePieceVocabulary,
    Vocabularies,
    Vocabulary,
    WordVocabulary,
    normalized,
    split_words,
)
from econmt.decoding.constraints.phrases import BLANK


def hard_alignment(
    attention: Tensor, source: Sequence[str], target: Sequence[str], vocabularies: Vocabularies
) -> list[tuple[int, int]]:
    """For each target word the source words that its tokens see most, as pairs of source and target word, from 0.

    Words are what stands between spaces, on both sides.

    Args:
        attention: (T + 1, S + 1). source, target: the S and T tokens.
    """
    if not source or not target:
        return []
    most = attention[: len(target), : len(source)].argmax(dim=1).tolist()
    source_words, target_words = _words(source, vocabularies.source), _words(target, vocabularies.target)
    return sorted(
        {(source_words[seen], target_words[at]) for at, seen in enumerate(most)}, key=lambda p: p[::-1]
    )


def _words(tokens: Sequence[str], vocabulary: Vocabulary) -> list[int]:
    """The number of the word that each token is in; a space alone belongs to the word behind it."""
    if isinstance(vocabulary, WordVocabulary):
        return list(range(len(tokens)))
    words, number, written = list[int](), 0, False
    for token in tokens:
        if token.startswith(BLANK) and written:
            number, written = number + 1, False
        written = written or token != BLANK
        words.append(number)
    last = max((word for word, token in zip(words, tokens, strict=True) if token != BLANK), default=0)
    return [min(word, last) for word in words]


def copied(attention: Tensor, ids: Sequence[int], text: str, vocabularies: Vocabularies) -> list[str]:
    """The target's tokens (T,), those that are unknown as the source writes what they see most.

    A word of a vocabulary of words stands for itself; of subwords an unknown one does, and for another its whole word.

    Args:
        attention: (T + 1, S + 1). ids: of the target. text: the source, raw.
    """
    tokens = vocabularies.target.tokens(ids)
    pieces, words = _written(text, vocabularies.source)
    source = min(len(pieces), attention.shape[1] - 1)
    if not source:
        return tokens
    for at, token in enumerate(ids):
        if token == UNK:
            seen = int(attention[at, :source].argmax())
            tokens[at] = words[seen]
    return tokens


def _written(text: str, vocabulary: Vocabulary) -> tuple[list[str], list[str]]:
    """The source's tokens as the text has them, and what is copied for each."""
    if isinstance(vocabulary, WordVocabulary):
        words = split_words(text)
        return words, words
    assert isinstance(vocabulary, SentencePieceVocabulary)
    pieces = [str(piece) for piece in vocabulary.processor.EncodeAsPieces(normalized(text))]
    ids, whole = vocabulary.processor.PieceToId(pieces), split_words(text)
    rows = zip(pieces, ids, _words(pieces, vocabulary), strict=True)
    return pieces, [piece if token == UNK else whole[number] for piece, token, number in rows]


def joined(tokens: Sequence[str], vocabulary: Vocabulary) -> str:
    """The raw text of tokens, some of which the vocabulary may lack."""
    if isinstance(vocabulary, WordVocabulary):
        return " ".join(tokens)
    assert isinstance(vocabulary, SentencePieceVocabulary)
    return str(vocabulary.processor.DecodePieces(list(tokens)))
