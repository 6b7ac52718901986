"""Results of searches: hypotheses of two searches together, and translations made of hypotheses or as copies.

Attention aligns their words, and tells which source text takes the place of unknown tokens.

Shapes: T target tokens, S source tokens, both without EOS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from econmt.data.text.source_factors import words_of_line
from econmt.data.text.vocabulary import UNK, WORD_START, Vocabularies, Vocabulary
from econmt.decoding.search.beam import Hypothesis
from econmt.decoding.translation import EMPTY, NBestEntry, Translation, one_line


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
    pairs = {(source_words[seen], target_words[at]) for at, seen in enumerate(most)}
    return sorted(pairs, key=lambda pair: pair[::-1])


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
    ids, words = vocabulary.encode(text), words_of_line(text, vocabulary)
    rows = zip(pieces, ids, _words(pieces, vocabulary), strict=True)
    return pieces, [piece if token == UNK else words[number] for piece, token, number in rows]


def copy_of(text: str, vocabularies: Vocabularies) -> Translation:
    """Returns the translation of a line that is copied, see :class:`Translation`."""
    written = one_line(text)
    if not written:
        return EMPTY
    tokens, ids = vocabularies.target.written(written), vocabularies.target.encode(written)
    alignment = [(word, word) for word in range(len(words_of_line(written, vocabularies.source)))]
    entry = NBestEntry(written, tokens, ids, 0.0, 0.0, None, False, alignment)
    return Translation(written, 0.0, 0.0, tokens, None, [entry], vocabularies.source.written(written))


def translation_of(
    text: str,
    source: Sequence[int],
    hypotheses: Sequence[Hypothesis],
    written: Iterator[str],
    vocabularies: Vocabularies,
    start: str,
    *,
    replace_unk: bool,
) -> Translation:
    """Makes the translation of a line's ``text`` and ids; ``written`` yields the hypotheses' texts in turn.

    With ``replace_unk`` the source text that an unknown token attends to most takes its place. No word is
    aligned to the ``start`` of the text, which is the source prefix, or copied from it.
    """
    source_tokens = vocabularies.source_tokens(source)
    first = min(len(vocabularies.source.encode(start)), len(source))
    entries = []
    for hypothesis, made in zip(hypotheses, written, strict=False):
        ids, tokens = hypothesis.ids, vocabularies.target.tokens(hypothesis.ids)
        alignment: list[tuple[int, int]] = []
        if hypothesis.attention is not None:
            of_text = hypothesis.attention[:, first:]
            alignment = hard_alignment(of_text, source_tokens[first:], tokens, vocabularies)
            if replace_unk and UNK in ids:
                tokens = copied(of_text, ids, tokens, text.removeprefix(start), vocabularies)
                made = vocabularies.target.joined(tokens)
        entries.append(NBestEntry(one_line(made), tokens, *hypothesis, alignment))
    best = entries[0]
    return Translation(
        best.text, best.score, best.log_probability, best.tokens, best.attention, entries, source_tokens
    )


def merged(kept: list[Hypothesis], found: list[Hypothesis], most: int) -> list[Hypothesis]:
    """Returns hypotheses of a search and as many of the next one as are missing, the best of the first search first."""
    known = [each.ids for each in kept]
    new = [each for each in found if each.ids not in known][: most - len(kept)]
    return [*kept[:1], *sorted([*kept[1:], *new], key=lambda each: -each.score)]
