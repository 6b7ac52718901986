"""Source factors: additional tokens for each source word, such as part of speech or case, in any number of streams.

Subwords get the factors of their word. A token and its factors form one joint id, see :mod:`econmt.factored_ids`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from econmt.data.text.vocabulary import UNK, WORD_START, Vocabularies, Vocabulary, split_words
from econmt.errors import InputError
from econmt.factored_ids import joined_ids


def count_of_ids(vocabularies: Vocabularies) -> int:
    """Returns the number of joint ids of source tokens and factors; raises InputError if it needs over 63 bits."""
    sizes = vocabularies.source.size, *vocabularies.factor_sizes
    if math.prod(sizes) >= 1 << 63:
        raise InputError(
            f"data.source_factors: vocabularies of {', '.join(f'{size:,}' for size in sizes)} tokens are too large "
            "together; use fewer factors, or factors with fewer values"
        )
    return math.prod(sizes)


def encode_sources(
    vocabularies: Vocabularies,
    texts: Sequence[str],
    factors: Sequence[Sequence[str]],
    name_of: Callable[[int, int | None], str],
    most_characters: int | None = None,
    warn: Callable[[str], None] | None = None,
) -> list[list[int]]:
    """Encodes source texts to ids, joint ids if the model has source factors.

    Args:
        vocabularies: vocabularies of the model.
        texts: raw source texts.
        factors: for each text, one line per stream; empty if the model has no factors or the text is blank.
        name_of: function from a text's index, and None or a stream's index, to its name in errors.
        most_characters: maximum number of characters; longer texts are cut.
        warn: receives a line if the model knows no token of a stream.

    Raises:
        InputError: if the number of streams, the number of factors or the order of streams is wrong; one line that
            names the text.
    """
    cut = [text[:most_characters] for text in texts]
    rows = vocabularies.source.encode_many(cut)
    stream_count = len(vocabularies.factors)
    for number, (text, streams_of_text) in enumerate(zip(texts, factors, strict=True)):
        if len(streams_of_text) != stream_count and (streams_of_text or text.strip()):
            raise InputError(
                f"{name_of(number, None)}: {_count(len(streams_of_text), 'stream')} of source factors, but the model "
                f"has {stream_count or 'none'}; give {'each of them' if stream_count else 'none'}"
            )
    if not stream_count:
        return rows
    sizes = vocabularies.source.size, *vocabularies.factor_sizes
    _check_order(vocabularies.factors, factors, name_of, warn)
    joint_rows = []
    for number, (text, streams_of_text, ids) in enumerate(zip(texts, factors, rows, strict=True)):
        words = len(words_of_line(text, vocabularies.source))
        streams = []
        for stream, (line, vocabulary) in enumerate(zip(streams_of_text, vocabularies.factors, strict=False)):
            streams.append(vocabulary.encode(line))
            if len(streams[-1]) != words:
                raise InputError(
                    f"{name_of(number, stream)}: {_count(len(streams[-1]), 'source factor')} for "
                    f"{_count(words, 'word')} of {name_of(number, None)}; give one for each word between spaces"
                )
        numbers = word_numbers(vocabularies.source.tokens(ids), vocabularies.source)
        if ids and numbers[-1] + 1 != len(words_of_line(cut[number], vocabularies.source)):
            problem = "its subwords cannot be assigned to words; remove the character U+2581"
            raise InputError(f"{name_of(number, None)}: {problem}")
        words_of_tokens = zip(ids, numbers, strict=True)
        joint_rows.append(
            [
                joined_ids(token, [stream[word] for stream in streams], sizes)
                for token, word in words_of_tokens
            ]
        )
    return joint_rows


def _check_order(
    vocabularies: Sequence[Vocabulary],
    factors: Sequence[Sequence[str]],
    name_of: Callable[[int, int | None], str],
    warn: Callable[[str], None] | None,
) -> None:
    """Raises InputError if a stream's vocabulary knows none of its tokens and another stream's knows all of them."""
    first = next((number for number, streams in enumerate(factors) if streams), 0)
    for stream, vocabulary in enumerate(vocabularies):
        tokens = {token for streams in factors if streams for token in split_words(streams[stream])}
        text = " ".join(tokens)
        if not tokens or any(number != UNK for number in vocabulary.encode(text)):
            continue
        complaint = f"the model's stream {stream + 1} of source factors knows none of its tokens"
        for other, candidate in enumerate(vocabularies):
            if other != stream and UNK not in candidate.encode(text):
                raise InputError(
                    f"{name_of(first, stream)}: {complaint}, but stream {other + 1} knows all of them; give the "
                    "streams in the order of data.source_factors"
                )
        if warn is not None:
            warn(f"{name_of(first, stream)}: {complaint}; is it another set of factors?")


def word_numbers(tokens: Sequence[str], vocabulary: Vocabulary) -> list[int]:
    """Returns the index of the word that each token of a text belongs to."""
    if not vocabulary.of_pieces:
        return list(range(len(tokens)))
    number = -1
    numbers: list[int] = []
    for token in tokens:
        number += token.startswith(WORD_START) or not numbers
        numbers.append(number)
    return numbers


def with_factors_of(ids: Sequence[int], cut: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Adds the factors of a sentence, given by its joint ids, to another segmentation by the source vocabulary."""
    size = vocabulary.size
    before, after = (
        word_numbers(vocabulary.tokens(tokens), vocabulary) for tokens in ([i % size for i in ids], cut)
    )
    factors = {number: token // size for number, token in zip(before, ids, strict=True)}
    return [token + size * factors[number] for token, number in zip(cut, after, strict=True)]


def words_of_line(text: str, vocabulary: Vocabulary) -> list[str]:
    """Splits a raw line into words, to which factors and alignments refer; for subwords U+2581 is a space, too."""
    return split_words(text.replace(WORD_START, " ") if vocabulary.of_pieces else text)


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"
