"""Text to ids and back, as econmt's vocabularies do it: SentencePiece subwords, or whole words."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from econmt_runtime.errors import RuntimeInputError
from econmt_runtime.files import AGAIN, read_file

PAD, UNK, BOS, EOS = 0, 1, 2, 3
_SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
_BLANKS = (
    " \t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
)


def normalized(text: str) -> str:
    """A line in NFC, without blanks of any kind at its ends."""
    return unicodedata.normalize("NFC", text).strip(_BLANKS)


class RuntimeVocabulary(Protocol):
    """Text to ids and back.

    Attributes:
        size: number of ids.
    """

    size: int

    def encode(self, text: str) -> list[int]:
        """Ids of a line, without sentence marks."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""


class Subwords:
    """Those of a SentencePiece model."""

    def __init__(self, path: Path) -> None:
        """Raises RuntimeInputError if the file is no such model."""
        import sentencepiece

        self._processor: Any = sentencepiece.SentencePieceProcessor()
        content = read_file(path)
        try:
            self._processor.LoadFromSerializedProto(content)
            self.size = int(self._processor.GetPieceSize())
            special = tuple(self._processor.IdToPiece(i) for i in range(min(4, self.size)))
        except (OSError, RuntimeError, IndexError) as error:
            raise RuntimeInputError(f"{path}: no SentencePiece model ({error}); {AGAIN}") from error
        if special != _SPECIAL:
            raise RuntimeInputError(f"{path}: its first subwords are not {' '.join(_SPECIAL)}; {AGAIN}")

    def encode(self, text: str) -> list[int]:
        """See :class:`RuntimeVocabulary`."""
        return list(self._processor.EncodeAsIds(normalized(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """See :class:`RuntimeVocabulary`."""
        return str(self._processor.DecodeIds(list(ids)))


class RuntimeWords:
    """What stands between spaces."""

    def __init__(self, path: Path) -> None:
        """Raises RuntimeInputError if the file is no list of words."""
        try:
            words = read_file(path).decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise RuntimeInputError(f"{path}: not valid UTF-8; {AGAIN}") from error
        if words[-1] or tuple(words[:4]) != _SPECIAL or len(set(words)) != len(words):
            raise RuntimeInputError(
                f"{path}: not one word a line, {' '.join(_SPECIAL)} first and none twice; {AGAIN}"
            )
        self._words = words[:-1]
        self.size = len(self._words)
        self._ids = {word: i for i, word in enumerate(self._words)}
        self._ids.update(dict.fromkeys(_SPECIAL, UNK))

    def encode(self, text: str) -> list[int]:
        """See :class:`RuntimeVocabulary`."""
        return [self._ids.get(word, UNK) for word in normalized(text).split(" ") if word]

    def decode(self, ids: Sequence[int]) -> str:
        """See :class:`RuntimeVocabulary`."""
        return " ".join(self._words[i] for i in ids if i not in (PAD, BOS, EOS))


def load_vocabularies(folder: Path, files: Sequence[str]) -> tuple[RuntimeVocabulary, RuntimeVocabulary]:
    """Those of source and target; one and the same if there is one file."""
    paths = [folder / name for name in files]
    made: list[RuntimeVocabulary] = [
        Subwords(path) if path.name.endswith(".model") else RuntimeWords(path) for path in paths
    ]
    return made[0], made[-1]


def one_line(text: str) -> str:
    """Text without line breaks, and without blanks at its ends."""
    return text.replace("\n", " ").replace("\r", " ").strip()
