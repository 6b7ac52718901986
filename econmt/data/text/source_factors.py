"""Source factors: a token more for each source word, as its part of speech or its case, in any number of streams.

Subwords have the factors of their word. A word and its factors are one number: :mod:`econmt.factored_ids`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from econmt.data.text.corpus import Corpus, read_lines
from econmt.data.text.subwords import (
    UNK,
    WORD_START,
    SentencePieceVocabulary,
    Vocabularies,
    Vocabulary,
    split_words,
)
from econmt.errors import InputError
from econmt.factored_ids import joined_ids


def count_of_ids(vocabularies: Vocabularies) -> int:
    """How many numbers source words with their factors can have.

    Raises:
        InputError: more than fit into 63 bits.
    """
    sizes = vocabularies.source.size, *vocabularies.factor_sizes
    if math.prod(sizes) >= 1 << 63:
        raise InputError(
            f"data.source_factors: vocabularies of {', '.join(f'{size:,}' for size in sizes)} tokens are too large "
            "together; give fewer factors, or such of fewer values"
        )
    return math.prod(sizes)


def encode_sources(
    vocabularies: Vocabularies,
    texts: Sequence[str],
    factors: Sequence[Sequence[str]],
    place: Callable[[int, int | None], str],
    most_characters: int | None = None,
    warn: Callable[[str], None] | None = None,
) -> list[list[int]]:
    """The numbers of the tokens of source texts, with their factors where the model has such.

    Args:
        vocabularies: of the model.
        texts: raw.
        factors: of each text, a text a stream; none for a model without, or for a blank text.
        place: what errors call the n-th text, and the n-th text's factors of a stream, counted from 0.
        most_characters: of a text, which is cut there.
        warn: Takes a line about a stream of which the model knows no token.

    Raises:
        InputError: one line that names the place: there are other streams than the model has, or other words, or the
            streams are in another order.
    """
    cut = [text[:most_characters] for text in texts]
    rows = vocabularies.source.encode_many(cut)
    wanted = len(vocabularies.factors)
    for number, (text, given) in enumerate(zip(texts, factors, strict=True)):
        if len(given) != wanted and (given or text.strip()):
            raise InputError(
                f"{place(number, None)}: {_count(len(given), 'stream')} of source factors, and the model has "
                f"{wanted or 'none'}; give {'each of them' if wanted else 'none'}"
            )
    if not wanted:
        return rows
    sizes = vocabularies.source.size, *vocabularies.factor_sizes
    _check_order(vocabularies.factors, factors, place, warn)
    found = []
    for number, (text, given, ids) in enumerate(zip(texts, factors, rows, strict=True)):
        words = len(_words(text, vocabularies.source))
        streams = []
        for stream, (line, vocabulary) in enumerate(zip(given, vocabularies.factors, strict=False)):
            streams.append(vocabulary.encode(line))
            if len(streams[-1]) != words:
                raise InputError(
                    f"{place(number, stream)}: {_count(len(streams[-1]), 'source factor')} for "
                    f"{_count(words, 'word')} of {place(number, None)}; give one for each word between spaces"
                )
        numbers = word_numbers(vocabularies.source.tokens(ids), vocabularies.source)
        if ids and numbers[-1] + 1 != len(_words(cut[number], vocabularies.source)):
            raise InputError(
                f"{place(number, None)}: nobody can tell which of its subwords are of which word; take out "
                "the character U+2581"
            )
        found.append(
            [
                joined_ids(token, [stream[word] for stream in streams], sizes)
                for token, word in zip(ids, numbers, strict=True)
            ]
        )
    return found


def _check_order(
    vocabularies: Sequence[Vocabulary],
    factors: Sequence[Sequence[str]],
    place: Callable[[int, int | None], str],
    warn: Callable[[str], None] | None,
) -> None:
    """Refuses streams in another order than the model's, which show by tokens that only another stream knows.

    Raises:
        InputError: the model knows no token of a stream, and another stream of the model knows all of them.
    """
    first = next((number for number, given in enumerate(factors) if given), 0)
    for stream, vocabulary in enumerate(vocabularies):
        tokens = {token for given in factors if given for token in split_words(given[stream])}
        text = " ".join(tokens)
        if not tokens or any(number != UNK for number in vocabulary.encode(text)):
            continue
        known = f"the model's stream {stream + 1} of source factors knows none of its tokens"
        for other, candidate in enumerate(vocabularies):
            if other != stream and UNK not in candidate.encode(text):
                raise InputError(
                    f"{place(first, stream)}: {known}, and stream {other + 1} knows all of them; give the streams in "
                    "the order of data.source_factors"
                )
        if warn is not None:
            warn(f"{place(first, stream)}: {known}; is it another set of factors?")


def word_numbers(tokens: Sequence[str], vocabulary: Vocabulary) -> list[int]:
    """The number, from 0, of the word that each token of a text is of."""
    if not isinstance(vocabulary, SentencePieceVocabulary):
        return list(range(len(tokens)))
    number = -1
    numbers: list[int] = []
    for token in tokens:
        number += token.startswith(WORD_START) or not numbers
        numbers.append(number)
    return numbers


def with_factors_of(ids: Sequence[int], cut: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Another cut of a sentence, each token with the factors that its word has.

    Args:
        ids: the sentence, words with factors. cut: ids of ``vocabulary``, that of the source, alone.
    """
    size = vocabulary.size
    before, after = (
        word_numbers(vocabulary.tokens(tokens), vocabulary) for tokens in ([i % size for i in ids], cut)
    )
    known = {number: token // size for number, token in zip(before, ids, strict=True)}
    return [token + size * known[number] for token, number in zip(cut, after, strict=True)]


def _words(text: str, vocabulary: Vocabulary) -> list[str]:
    """The words of a text, to which SentencePiece's sign for a blank is one."""
    of_pieces = isinstance(vocabulary, SentencePieceVocabulary)
    return split_words(text.replace(WORD_START, " ") if of_pieces else text)


def with_factors(pairs: Iterator[tuple[str, str]], corpus: Corpus) -> Iterator[tuple[str, ...]]:
    """The pairs of a corpus, in each tuple after source and target the factors, a text a stream.

    Raises:
        InputError: a file of factors has more or fewer lines than there are pairs.
    """
    streams = [read_lines(path) for path in corpus.factors]
    number = 0
    for number, pair in enumerate(pairs, 1):
        lines = [next(stream, None) for stream in streams]
        for path, line in zip(corpus.factors, lines, strict=True):
            if line is None:
                raise _different(path, number - 1, corpus.source, number + sum(1 for _ in pairs))
        yield *pair, *(line for line in lines if line is not None)
    for path, stream in zip(corpus.factors, streams, strict=True):
        if rest := sum(1 for _ in stream):
            raise _different(path, number + rest, corpus.source, number)


def _different(path: Path, count: int, source: Path, pairs: int) -> InputError:
    return InputError(
        f"{path} has {_count(count, 'line')} but {source} has {pairs:,}; line n of one must hold the source factors of "
        "line n of the other"
    )


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"
