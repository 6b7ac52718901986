"""Word alignments derived from the attention, and copying of source text for unknown tokens.

Shapes: T target tokens, S source tokens, both without EOS.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from econmt.data.text.vocabulary import (
    UNK,
    WORD_START,
    Vocabularies,
    Vocabulary,
    split_words,
)


def hard_alignment(
    attention: Tensor, source: Sequence[str], target: Sequence[str], vocabularies: Vocabularies
) -> list[tuple[int, int]]:
    """Returns pairs of source and target words, from 0: for each target word those that its tokens attend to most.

    Words are separated by spaces on both sides. ``attention`` is (T + 1, S + 1).
    """
    if not source or not target:
        return []
    most = attention[: len(target), : len(source)].argmax(dim=1).tolist()
    source_words, target_words = _words(source, vocabularies.source), _words(target, vocabularies.target)
    return sorted(
        {(source_words[seen], target_words[at]) for at, seen in enumerate(most)}, key=lambda p: p[::-1]
    )


def _words(tokens: Sequence[str], vocabulary: Vocabulary) -> list[int]:
    """Returns the index of the word of each token; a single space belongs to the next word."""
    if not vocabulary.of_pieces:
        return list(range(len(tokens)))
    words, number, written = list[int](), 0, False
    for token in tokens:
        if token.startswith(WORD_START) and written:
            number, written = number + 1, False
        written = written or token != WORD_START
        words.append(number)
    last = max((word for word, token in zip(words, tokens, strict=True) if token != WORD_START), default=0)
    return [min(word, last) for word in words]


def copied(
    attention: Tensor, ids: Sequence[int], tokens: Sequence[str], text: str, vocabularies: Vocabularies
) -> list[str]:
    """Returns the target's tokens (T,) with each of id UNK replaced by the source text that it attends to most.

    From a vocabulary of words a single word is copied; from subwords an unknown token, or else its whole word.
    ``attention`` is (T + 1, S + 1), ``text`` the raw source.
    """
    tokens = list(tokens)
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
    """Returns the source's tokens as written in the text, and the text to copy for each."""
    pieces = vocabulary.written(text)
    if not vocabulary.of_pieces:
        return pieces, pieces
    ids, words = vocabulary.encode(text), split_words(text)
    rows = zip(pieces, ids, _words(pieces, vocabulary), strict=True)
    return pieces, [piece if token == UNK else words[number] for piece, token, number in rows]
