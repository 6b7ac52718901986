"""Raw phrases: their segmentation into the tokens of a target vocabulary, and lists of phrases to avoid."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from econmt.data.text.corpus import read_lines
from econmt.data.text.glossary import SPACELESS
from econmt.data.text.vocabulary import BOS, EOS, PAD, UNK, WORD_START, Vocabulary, normalized, split_words

_MARKER = "\ufffe"
"""Character that occurs in no text; text after it is segmented as within a word."""


def is_of_word(character: str) -> bool:
    """Returns True for a letter, mark or digit of a script with spaces between words."""
    return unicodedata.category(character)[0] in "LMN" and not re.match(f"[{SPACELESS}]", character)


class Spelling:
    """Spelling of a vocabulary's ids.

    Attributes:
        pieces: text of each id, with a leading space as ``WORD_START``; empty for special tokens.
        ids: id of each piece.
        joins: (V,) bool, True for ids that continue the word of the token before.
        words: True if tokens are whole words.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.words = not vocabulary.of_pieces
        pieces = vocabulary.tokens(range(vocabulary.size))
        self.pieces = [WORD_START + piece for piece in pieces] if self.words else list(pieces)
        for special in (PAD, UNK, BOS, EOS):
            self.pieces[special] = ""
        self.ids = {piece: number for number, piece in enumerate(self.pieces) if piece}
        self.joins: Tensor = torch.tensor([piece != "" and is_of_word(piece[0]) for piece in self.pieces])

    @cached_property
    def tails(self) -> dict[str, list[tuple[int, int]]]:
        """Positions of pairs of characters in pieces, and of last characters: id and offset of each."""
        tails: dict[str, list[tuple[int, int]]] = {}
        for token, piece in enumerate(self.pieces):
            for offset in range(len(piece)):
                tails.setdefault(piece[offset : offset + 2], []).append((token, offset))
        return tails

    @cached_property
    def in_order(self) -> list[tuple[str, int]]:
        """Sorted pieces with their ids."""
        return sorted(self.ids.items())

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a phrase within a sentence; ``UNK`` if the vocabulary lacks a character or word."""
        text = normalized(text)
        ids = tuple(self._vocabulary.encode(text))
        # An unknown first character would merge with the marker.
        if UNK in ids or self.words or not re.match(f"[{SPACELESS}]", text):
            return ids
        marked = self._vocabulary.encode(_MARKER + text)
        return tuple(marked[marked.index(UNK) + 1 :])

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of a translation or phrase, with single blanks."""
        return " ".join(split_words(self._vocabulary.decode(ids)))

    def ends_word(self, text: str) -> bool:
        """Returns True if the token after a phrase must not continue its last word."""
        return not self.words and is_of_word(normalized(text)[-1])


def read_avoid_list(path: Path) -> tuple[str, ...]:
    """Reads phrases that no translation may contain, one a line. Blank lines are skipped.

    Raises:
        InputError: The file cannot be read; the message names it.
    """
    phrases = (" ".join(split_words(line)) for line in read_lines(path))
    return tuple(dict.fromkeys(filter(None, phrases)))
