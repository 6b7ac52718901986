"""Text to ids and back, as econmt's vocabularies do it: SentencePiece subwords, or whole words."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from econmt_runtime.errors import RuntimeInputError

PAD, UNK, BOS, EOS = 0, 1, 2, 3
_SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
_BLANKS = (
    " \t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
)


def normalized(text: str) -> str:
    """A line in NFC, without blanks of any kind at its ends."""
    return unicodedata.normalize("NFC", text).strip(_BLANKS)


class Vocabulary(Protocol):
    """Text to ids and back."""

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
        try:
            self._processor.LoadFromSerializedProto(path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise RuntimeInputError(
                f"{path}: no SentencePiece model ({error}); export the model again"
            ) from error

    def encode(self, text: str) -> list[int]:
        """See :class:`Vocabulary`."""
        return list(self._processor.EncodeAsIds(normalized(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """See :class:`Vocabulary`."""
        return str(self._processor.DecodeIds(list(ids)))


class Words:
    """What stands between spaces."""

    def __init__(self, path: Path) -> None:
        """Raises RuntimeInputError if the file is no list of words."""
        try:
            self._words = path.read_text(encoding="utf-8").split("\n")[:-1]
        except (OSError, UnicodeDecodeError) as error:
            raise RuntimeInputError(f"{path}: cannot be read ({error}); export the model again") from error
        self._ids = {word: i for i, word in enumerate(self._words)}
        self._ids.update(dict.fromkeys(_SPECIAL, UNK))

    def encode(self, text: str) -> list[int]:
        """See :class:`Vocabulary`."""
        return [self._ids.get(word, UNK) for word in normalized(text).split(" ") if word]

    def decode(self, ids: Sequence[int]) -> str:
        """See :class:`Vocabulary`."""
        return " ".join(self._words[i] for i in ids if i not in (PAD, BOS, EOS))


def load_vocabularies(folder: Path, files: Sequence[str]) -> tuple[Vocabulary, Vocabulary]:
    """Those of source and target; one and the same if there is one file."""
    if not files:
        raise RuntimeInputError(f"{folder}: names no vocabulary; export the model again")
    made: list[Vocabulary] = []
    for name in files:
        path = folder / Path(name).name
        made.append(Subwords(path) if name.endswith(".model") else Words(path))
    return made[0], made[-1]


def one_line(text: str) -> str:
    """Text without line breaks, and without blanks at its ends."""
    return text.replace("\n", " ").replace("\r", " ").strip()
