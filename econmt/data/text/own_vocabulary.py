"""Vocabularies that a user brings along: SentencePiece models and lists of words, converted to econmt's ids.

econmt gives the ids 0 to 3 to ``<pad>``, ``<unk>``, ``<s>`` and ``</s>``. Models of other programs have other special
tokens, mostly without padding. A SentencePiece model is a message of Protocol Buffers, which is rewritten here without
their library: special pieces are replaced, all others keep their order, scores and types, so that it divides text as
before.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from econmt.config.recipe import CodesSubwords, Data, SentencePieceSubwords, TextData, TextSubwords
from econmt.data.text.corpus import find_text, read_lines
from econmt.errors import InputError

_PIECE, _TRAINER, _SELF_TEST = 1, 2, 4
"""Fields of a SentencePiece model: a piece (repeated), the settings of its training, and examples."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of pieces."""
_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_TYPE_FIELD, _SIZE_FIELD, _INPUT_FORMAT, _UNK_SURFACE = 3, 4, 7, 44
_ID_FIELDS, _PIECE_FIELDS = (43, 40, 41, 42), (48, 45, 46, 47)
"""Fields of the settings with ids and names of padding, unknown pieces, begin and end of a sentence."""
_FOREIGN_SPECIAL = {"<blank>", "<PAD>", "<UNK>", "<BOS>", "<EOS>", "<bos>", "<eos>", "<padding>"}
"""Special tokens of other programs, which are no words."""
LARGEST = 1 << 28
"""Bytes of the largest file that is read."""


def own_subwords(path: Path, kind: str, special: Sequence[str], tags: Sequence[str]) -> bytes:
    """Returns a SentencePiece model with econmt's special tokens.

    Args:
        path: the user's model. kind: its type, bpe or unigram, as the recipe says.
        special: special tokens in the order of their ids. tags: symbols that are added unless the model has them.

    Raises:
        InputError: the file is no SentencePiece model, or of another type.
    """
    content = _content(path)
    try:
        fields = list(_fields(content))
        settings = b"".join(part for number, part, _ in fields if number == _TRAINER)
        found = next((_number(part) for number, part, _ in _fields(settings) if number == _TYPE_FIELD), 1)
        pieces = [(*_piece(part), whole) for number, part, whole in fields if number == _PIECE]
    except (IndexError, struct.error, UnicodeDecodeError):
        pieces, settings, found = [], b"", 1
    if not pieces:
        raise InputError(f"{path}: not a SentencePiece model; give the .model file that spm_train wrote")
    if _TYPES.get(found) != kind:
        raise InputError(
            f"{path}: a SentencePiece model of type {_TYPES.get(found, found)}; data.subwords.type is {kind}"
            + (f"; set it to {_TYPES[found]}" if _TYPES.get(found) in ("bpe", "unigram") else "")
        )
    kept = [
        (text, whole)
        for text, type_of, whole in pieces
        if type_of not in (_UNKNOWN, _CONTROL) and text not in special
    ]
    known = {text for text, _ in kept}
    types = [_UNKNOWN if number == 1 else _CONTROL for number in range(len(special))]
    made = [_new_piece(text, type_of) for text, type_of in zip(special, types, strict=True)]
    made += [whole for _, whole in kept]
    made += [_new_piece(tag, _USER_DEFINED) for tag in tags if tag not in known]
    # A field that is given again replaces the earlier value.
    settings += _varint_field(_SIZE_FIELD, len(made)) + _text_field(_UNK_SURFACE, special[1])
    settings += b"".join(_varint_field(field, number) for number, field in enumerate(_ID_FIELDS))
    settings += b"".join(_text_field(field, text) for field, text in zip(_PIECE_FIELDS, special, strict=True))
    others = [whole for number, _, whole in fields if number not in (_PIECE, _TRAINER, _SELF_TEST)]
    return b"".join([*made, _bytes_field(_TRAINER, settings), *others])


def without_input_format(model: bytes) -> bytes:
    """Returns a SentencePiece model without the note in which format its training text was given."""
    parts = []
    for number, content, whole in _fields(model):
        if number == _TRAINER:
            settings = b"".join(each for field, _, each in _fields(content) if field != _INPUT_FORMAT)
            whole = _bytes_field(_TRAINER, settings)
        parts.append(whole)
    return b"".join(parts)


def own_words(path: Path, special: Sequence[str]) -> list[str]:
    """Reads the words of a list, without special tokens, in its order.

    A line has a word, and may have a number after a space or tab, as the lists of subword-nmt, OpenNMT and fairseq do.
    A file that ends in ``.json`` is an object from words to ids, as Sockeye writes.

    Raises:
        InputError: a line has several words, a word occurs twice, or there is none.
    """
    if path.suffix == ".json":
        try:
            ids = json.loads(_content(path))
            words = sorted(dict(ids), key=ids.__getitem__)
        except (ValueError, TypeError):
            raise InputError(f"{path}: not a JSON object from words to ids; give a list of words") from None
        numbered = list(enumerate(words, 1))
    else:
        numbered = [
            (number, _word(line, path, number)) for number, line in enumerate(read_lines(path), 1) if line
        ]
    skipped, seen = {*special, *_FOREIGN_SPECIAL}, dict[str, int]()
    for number, word in numbered:
        if word in skipped:
            continue
        if word in seen:
            raise InputError(
                f"{path}:{number}: the word '{word}' is also in line {seen[word]}; remove one of them"
            )
        seen[word] = number
    if not seen:
        raise InputError(f"{path}: has no word; give a list of words, one a line")
    return list(seen)


def _word(line: str, path: Path, number: int) -> str:
    match = re.fullmatch(r"(\S+)(?:[ \t]+[-+0-9.e]+)?\s*", line)
    if match is None:
        raise InputError(
            f"{path}:{number}: expected a word, and perhaps a number after it, found '{line[:40]}'"
        )
    return match[1]


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(f"{path}: larger than {LARGEST // 1_000_000} MB; is this a vocabulary?")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at a position of a message, and the position after it."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields number, content and whole encoding of the fields of a message; raises IndexError if it is none."""
    at = 0
    while at < len(message):
        begin = at
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            start = at
            _, at = _varint(message, at)
        elif wire == 2:
            size, start = _varint(message, at)
            at = start + size
        else:
            start, at = at, at + {1: 8, 5: 4}.get(wire, len(message) + 1)
        if at > len(message) or key < 8:
            raise IndexError
        yield key >> 3, message[start:at], message[begin:at]


def _number(content: bytes) -> int:
    return _varint(content, 0)[0]


def _piece(message: bytes) -> tuple[str, int]:
    """Returns the text and the type of a piece."""
    text, type_of = "", _NORMAL
    for number, content, _ in _fields(message):
        if number == 1:
            text = content.decode("utf-8")
        elif number == 3:
            type_of = _number(content)
    return text, type_of


def _encoded(value: int) -> bytes:
    """Encodes a number that is not negative."""
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _varint_field(number: int, value: int) -> bytes:
    return _encoded(number << 3) + _encoded(value)


def _bytes_field(number: int, content: bytes) -> bytes:
    return _encoded(number << 3 | 2) + _encoded(len(content)) + content


def _text_field(number: int, text: str) -> bytes:
    return _bytes_field(number, text.encode())


def _new_piece(text: str, type_of: int) -> bytes:
    score = _encoded(2 << 3 | 5) + struct.pack("<f", 0.0)
    return _bytes_field(_PIECE, _text_field(1, text) + score + _varint_field(3, type_of))


def find_own_vocabulary(data: Data | TextData, search: Sequence[Path]) -> list[Path]:
    """Finds the files of vocabularies that the recipe names; none if they are learnt."""
    subwords = data.subwords
    if isinstance(subwords, (SentencePieceSubwords, TextSubwords)):
        names = subwords.models
    elif isinstance(subwords, CodesSubwords):
        names = [*subwords.files, *subwords.vocabularies]
    else:
        names = subwords.lists
    return [find_text(name, search, progress=False, fetch=False) for name in names]
