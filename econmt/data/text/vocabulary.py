"""Vocabularies: conversion of text to ids and back, with subwords or whole words.

Text is normalised to Unicode NFC, so that composed and decomposed letters are equal, and otherwise unchanged
(SentencePiece's rule ``identity``, not its default ``nmt_nfkc``, which also rewrites full-width letters and ligatures).
Repeated spaces become one, and spaces at the ends of a line are removed. Characters that do not occur in the training
text become ``<unk>``. Byte fallback is off, because its 256 entries would crowd out small vocabularies, and a few
million words do not teach a model to write unseen characters byte by byte.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import sentencepiece

from econmt.data.text.own_vocabulary import MergeCodes
from econmt.data.text.words import BLANKS
from econmt.errors import InputError

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<unk>", "<s>", "</s>")

WORD_START = "\u2581"
"""Character by which a subword marks a space before it; tags begin with it, so that they are separate words."""


class Vocabulary(Protocol):
    """Interface of vocabularies. Ids 0 to 3 are ``<pad>``, ``<unk>``, ``<s>`` and ``</s>``."""

    size: int
    """Number of ids, special ones included."""
    of_pieces: bool
    """True if tokens are subwords, which mark a preceding space by U+2581; False if they are whole words."""

    def encode(self, text: str) -> list[int]:
        """Encodes a line of raw text to ids, without ``<s>`` and ``</s>``."""

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """:meth:`encode` for many lines at once."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids to raw text without padding and sentence marks; unknown ids become ``<unk>``."""

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """:meth:`decode` for many lines at once."""
        return [self.decode(ids) for ids in rows]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary entry of each id (subwords mark a preceding space by U+2581)."""

    def written(self, text: str) -> list[str]:
        """Returns the tokens of a line of raw text as the text has them, unknown ones, too."""

    def joined(self, tokens: Sequence[str]) -> str:
        """Returns the raw text of tokens, some of which the vocabulary may lack."""


class SentencePieceVocabulary(Vocabulary):
    """Vocabulary of SentencePiece subwords."""

    of_pieces = True

    def __init__(self, model: bytes, where: str) -> None:
        """Loads a serialised SentencePiece model, whose special ids must be this module's; errors name ``where``."""
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(model)
            known = range(min(4, self.processor.GetPieceSize()))
            special = tuple(self.processor.IdToPiece(i) for i in known)
        except (RuntimeError, IndexError, OSError) as error:
            raise InputError(f"{where}: not a SentencePiece model, or damaged") from error
        if special != SPECIAL_TOKENS:
            raise InputError(
                f"{where}: not a subword model made by econmt (its first ids are {list(special)})"
            )
        self.size = int(self.processor.GetPieceSize())
        pieces = self.processor.IdToPiece(list(range(self.size)))
        # Words are told apart by the marks with which their first subwords begin.
        if "".join(self.processor.EncodeAsPieces("x")).endswith(WORD_START) or any(
            WORD_START in piece.lstrip(WORD_START) for piece in pieces
        ):
            raise InputError(
                f"{where}: has subwords with a space (U+2581) at their ends or inside, so that words cannot be "
                "counted; train it without treat_whitespace_as_suffix and with split_by_whitespace"
            )
        # A cache takes a tenth of the time of a look-up in SentencePiece.
        self._piece = cache(self.processor.IdToPiece)

    def encode(self, text: str) -> list[int]:
        """Encodes a line of raw text to ids."""
        return list(self.processor.EncodeAsIds(normalized(text)))

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """:meth:`encode` for many lines at once, on several threads."""
        normalised = [normalized(text) for text in texts]
        return list(self.processor.EncodeAsIds(normalised)) if normalised else []

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids to raw text."""
        return str(self.processor.DecodeIds([int(i) for i in ids]))

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """:meth:`decode` for many lines at once, on several threads."""
        return list(self.processor.DecodeIds([[int(i) for i in ids] for ids in rows])) if rows else []

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Returns the subword of each id."""
        return [self._piece(int(i)) for i in ids]

    def written(self, text: str) -> list[str]:
        """Divides a line of raw text into subwords."""
        return [str(piece) for piece in self.processor.EncodeAsPieces(normalized(text))]

    def joined(self, tokens: Sequence[str]) -> str:
        """Joins subwords to raw text."""
        return str(self.processor.DecodePieces(list(tokens)))


class _ListedVocabulary(Vocabulary):
    """Vocabulary of tokenised text, given by its tokens in the order of their ids, the four special ones first."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens, self.size = list(tokens), len(tokens)
        self._ids = {token: i for i, token in enumerate(tokens) if i >= len(SPECIAL_TOKENS)}

    def encode(self, text: str) -> list[int]:
        """Encodes a line of tokenised text to ids."""
        ids = self._ids
        return [ids.get(token, UNK) for token in self.written(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids to tokenised text."""
        return self.joined([self._tokens[i] for i in ids if i not in (PAD, BOS, EOS)])

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Returns the token of each id."""
        return [self._tokens[i] for i in ids]


class CodesVocabulary(_ListedVocabulary):
    """Vocabulary of subwords by codes of subword-nmt.

    Subwords are written as SentencePiece's, with a mark at the beginning of a word instead of ``@@`` before its end.

    Args:
        codes: division of words. pieces: subwords in the order of their ids, the four special tokens first.
        tags: words that are never divided.
    """

    of_pieces = True

    def __init__(self, codes: MergeCodes, pieces: Sequence[str], tags: Sequence[str] = ()) -> None:
        super().__init__(pieces)
        self.codes, self.tags = codes, list(tags)

    def written(self, text: str) -> list[str]:
        """Divides a line of tokenised text into subwords; the mark is one of its own where the two are unknown."""
        written: list[str] = []
        for first, *rest in pieces_of(text, self.codes, self.tags):
            written += [first] if first in self._ids else [WORD_START, first.removeprefix(WORD_START)]
            written += rest
        return written

    def joined(self, tokens: Sequence[str]) -> str:
        """Joins subwords to tokenised text."""
        return "".join(tokens).replace(WORD_START, " ").strip(" ")


def pieces_of(text: str, codes: MergeCodes, tags: Sequence[str]) -> list[list[str]]:
    """Divides the words of a line of tokenised text, except tags, into subwords with a mark at their beginnings."""
    words = split_words(text.replace(WORD_START, " "))
    return [
        [WORD_START + first, *rest]
        for first, *rest in ([word] if word in tags else codes.cut(word) for word in words)
    ]


class WordVocabulary(_ListedVocabulary):
    """Vocabulary of whole words between spaces."""

    of_pieces = False

    def written(self, text: str) -> list[str]:
        """Splits a line of tokenised text into words."""
        return split_words(text)

    def joined(self, tokens: Sequence[str]) -> str:
        """Joins words by spaces."""
        return " ".join(tokens)


class Vocabularies(NamedTuple):
    """Vocabularies of both sides, the same object if joint, and of source factors."""

    source: Vocabulary
    target: Vocabulary
    factors: tuple[Vocabulary, ...] = ()
    """Vocabulary of each stream of source factors."""

    @property
    def sides(self) -> tuple[Vocabulary, Vocabulary]:
        """Source and target vocabulary."""
        return self.source, self.target

    @property
    def target_tags(self) -> dict[str, str]:
        """Source tokens such as ``<2de>`` by the target language that each chooses; empty if there are not several."""
        words = (token.removeprefix(WORD_START) for token in self.source.tokens(range(self.source.size)))
        tags = {word[2:-1]: word for word in words if re.fullmatch("<2[a-z]{2,3}([-_][A-Za-z0-9]+)*>", word)}
        return tags if len(tags) > 1 else {}

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        """Returns the tokens of a source, given by its ids, joint ids or not."""
        return self.source.tokens([i % self.source.size for i in ids])

    @property
    def factor_sizes(self) -> tuple[int, ...]:
        """Vocabulary size of each stream of source factors."""
        return tuple(vocabulary.size for vocabulary in self.factors)


def normalized(text: str) -> str:
    """Returns a line in NFC without white space of any kind (tabs, no-break spaces) at its ends."""
    return unicodedata.normalize("NFC", text).strip(BLANKS)


def split_words(text: str) -> list[str]:
    """Splits a line of tokenised text at spaces into words in NFC."""
    return [word for word in normalized(text).split(" ") if word]
