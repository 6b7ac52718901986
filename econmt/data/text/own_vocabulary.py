"""Vocabularies that a user brings along: SentencePiece models and lists of words, converted to econmt's ids.

econmt gives the ids 0 to 3 to ``<pad>``, ``<unk>``, ``<s>`` and ``</s>``. Models of other programs have other special
tokens, mostly without padding. In a SentencePiece model, special pieces are replaced; all others keep their order,
scores and types, so that it divides text as before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from econmt.config.recipe import CodesSubwords, Data, SentencePieceSubwords, TextData, TextSubwords
from econmt.data.text.corpus import find_text, read_lines
from econmt.errors import InputError

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
    model = _parsed(_content(path))
    if model is None or not model.pieces:
        raise InputError(f"{path}: not a SentencePiece model; give the .model file that spm_train wrote")
    settings, piece = model.trainer_spec, type(model).SentencePiece
    found = settings.ModelType.Name(settings.model_type).lower()
    if found != kind:
        raise InputError(
            f"{path}: a SentencePiece model of type {found}; data.subwords.type is {kind}"
            + (f"; set it to {found}" if found in ("bpe", "unigram") else "")
        )
    kept = [
        each
        for each in model.pieces
        if each.type not in (piece.UNKNOWN, piece.CONTROL) and each.piece not in special
    ]
    known = {each.piece for each in kept}
    types = [piece.UNKNOWN if number == 1 else piece.CONTROL for number in range(len(special))]
    made = [piece(piece=text, score=0.0, type=type_of) for text, type_of in zip(special, types, strict=True)]
    made += kept
    made += [piece(piece=tag, score=0.0, type=piece.USER_DEFINED) for tag in tags if tag not in known]
    model.ClearField("pieces")
    model.pieces.extend(made)
    settings.vocab_size, settings.unk_surface = len(made), special[1]
    for number, name in enumerate(("pad", "unk", "bos", "eos")):
        setattr(settings, f"{name}_id", number)
        setattr(settings, f"{name}_piece", special[number])
    model.DiscardUnknownFields()  # examples by which SentencePiece would test the model
    return bytes(model.SerializeToString())


def without_input_format(content: bytes) -> bytes:
    """Returns a SentencePiece model without the note in which format its training text was given."""
    model = _parsed(content)
    assert model is not None
    model.trainer_spec.ClearField("input_format")
    return bytes(model.SerializeToString())


def _parsed(content: bytes) -> Any:
    """Returns a SentencePiece model as a message of Protocol Buffers; None if it is none."""
    from google.protobuf.message import DecodeError  # takes as long as all of this package
    from sentencepiece import sentencepiece_model_pb2

    try:
        return sentencepiece_model_pb2.ModelProto.FromString(content)  # type: ignore[attr-defined]  # made when loaded
    except (DecodeError, UnicodeDecodeError):
        return None


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
