"""Conversion between text and ids with econmt's vocabularies: SentencePiece subwords, or whole words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from econmt_runtime.errors import RuntimeInputError
from econmt_runtime.files import AGAIN, read_file

PAD, UNK, BOS, EOS = 0, 1, 2, 3
_SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
_BLANKS = (
    " \t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
)

_SIGN = "[!#-%'*-;=?-~\u00c0-\u0dff]|&amp;|&(?!#?\\w+;)"
_ADDRESS = re.compile(
    rf"(?<![A-Za-z0-9])(?:[A-Za-z][A-Za-z0-9+.-]{{1,20}}://|www\.)(?:{_SIGN}|\((?:{_SIGN})*\))*"
    rf"(?:[#-%/0-9=@A-Za-z&\u00c0-\u0dff]|\((?:{_SIGN})*\))(?<!&)"
    r"|(?<![\w.%+-])(?:mailto:)?[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})+"
)
"""URLs and e-mail addresses, as in econmt.data.text.words."""


def has_words(text: str) -> bool:
    """Returns True if a text has a letter outside of URLs and e-mail addresses."""
    return any(map(str.isalpha, text)) and any(map(str.isalpha, _ADDRESS.sub(" ", text)))


def normalized(text: str) -> str:
    """Returns a line in NFC, without blanks of any kind at its ends."""
    return unicodedata.normalize("NFC", text).strip(_BLANKS)


class Subwords:
    """Vocabulary of a SentencePiece model; ``size`` is its number of ids."""

    def __init__(self, path: Path) -> None:
        """Loads the model; raises RuntimeInputError if the file is not a SentencePiece model."""
        import sentencepiece

        self._processor: Any = sentencepiece.SentencePieceProcessor()
        content = read_file(path)
        try:
            self._processor.LoadFromSerializedProto(content)
            self.size = int(self._processor.GetPieceSize())
            special = tuple(self._processor.IdToPiece(i) for i in range(min(4, self.size)))
        except (OSError, RuntimeError, IndexError) as error:
            raise RuntimeInputError(f"{path}: not a SentencePiece model ({error}); {AGAIN}") from error
        if special != _SPECIAL:
            raise RuntimeInputError(f"{path}: its first subwords are not {' '.join(_SPECIAL)}; {AGAIN}")

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a line, without BOS and EOS."""
        return list(self._processor.EncodeAsIds(normalized(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        return str(self._processor.DecodeIds(list(ids)))


class RuntimeWords:
    """Vocabulary of words separated by spaces; ``size`` is its number of ids."""

    def __init__(self, path: Path) -> None:
        """Loads the list of words; raises RuntimeInputError if the file is not one."""
        try:
            words = read_file(path).decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise RuntimeInputError(f"{path}: not valid UTF-8; {AGAIN}") from error
        if words[-1] or tuple(words[:4]) != _SPECIAL or len(set(words)) != len(words):
            raise RuntimeInputError(
                f"{path}: not a list of distinct words, one per line, beginning with {' '.join(_SPECIAL)}; {AGAIN}"
            )
        self._words = words[:-1]
        self.size = len(self._words)
        self._ids = {word: i for i, word in enumerate(self._words)}
        self._ids.update(dict.fromkeys(_SPECIAL, UNK))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a line, without BOS and EOS."""
        return [self._ids.get(word, UNK) for word in normalized(text).split(" ") if word]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        return " ".join(self._words[i] for i in ids if i not in (PAD, BOS, EOS))


def load_vocabularies(
    folder: Path, files: Sequence[str]
) -> tuple[Subwords | RuntimeWords, Subwords | RuntimeWords]:
    """Returns the vocabularies of source and target, which are the same object if there is one file."""
    paths = [folder / name for name in files]
    vocabularies = [Subwords(path) if path.suffix == ".model" else RuntimeWords(path) for path in paths]
    return vocabularies[0], vocabularies[-1]


def one_line(text: str) -> str:
    """Returns text without line breaks, and without blanks at its ends."""
    return text.replace("\n", " ").replace("\r", " ").strip()
