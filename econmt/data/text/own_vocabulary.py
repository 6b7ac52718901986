"""Vocabularies that a user brings along: SentencePiece models, lists of words, and codes of subword-nmt.

econmt gives the ids 0 to 3 to ``<pad>``, ``<unk>``, ``<s>`` and ``</s>``. Models of other programs have other special
tokens, mostly without padding. In a SentencePiece model, special pieces are replaced; all others keep their order,
scores and types, so that it divides text as before.

Codes (Sennrich et al., 2016) are merges of byte-pair encoding that divide the words of tokenised text. A word is its
characters and a mark of its end; the pair with the earliest rule in the list is merged until none fits. In files of
version 0.2 the mark is a part of the last character, in those of version 0.1 a symbol of its own. With a vocabulary,
subwords that it lacks are divided again, as by ``--vocabulary`` of subword-nmt's apply-bpe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from econmt.config import limits
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
    made += kept + [piece(piece=tag, score=0.0, type=piece.USER_DEFINED) for tag in tags if tag not in known]
    is_ours = made == [*model.pieces]
    model.ClearField("pieces")
    model.pieces.extend(made)
    settings.vocab_size, settings.unk_surface = len(made), special[1]
    for number, name in enumerate(("pad", "unk", "bos", "eos")):
        setattr(settings, f"{name}_id", number)
        if not is_ours:  # which stays byte for byte the same
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


_END = "</w>"
_SEPARATOR = "@@"
_VERSION = re.compile(r"#version:\s*([0-9.]+?)(?:\.0+)*")
_MAX_CACHED = 200_000
"""Words whose division is kept; the text of half a million pairs has fewer."""

Rule = tuple[str, str]


class MergeCodes:
    """Division of words by a list of merges.

    Args:
        rules: pairs to merge, the first ones first.
        version: 2 if the end of a word is a part of its last character, 1 if it is a symbol of its own.
        kept: subwords that are not divided again, as subword-nmt writes them, with ``@@`` unless they end a word; None:
            all.
    """

    def __init__(self, rules: Sequence[Rule], version: int = 2, kept: Collection[str] | None = None) -> None:
        self.rules, self.version = list(rules), version
        self.kept = None if kept is None else frozenset(kept)
        # Of equal rules the first one counts, and so does the first of several that make the same subword.
        backwards = reversed(list(enumerate(self.rules)))
        self._ranks: dict[Rule, int] = {rule: rank for rank, rule in backwards}
        self._parts = {left + right: (left, right) for left, right in self._ranks}
        self._cuts: dict[str, tuple[str, ...]] = {}

    def cut(self, word: str) -> tuple[str, ...]:
        """Divides a word into subwords."""
        known = self._cuts.get(word)
        if known is None:
            if len(self._cuts) >= _MAX_CACHED:
                self._cuts.clear()
            known = self._cuts[word] = tuple(self._divide(word))
        return known

    def _divide(self, word: str) -> list[str]:
        if len(word) < 2:
            return [word]
        symbols = [*word, _END] if self.version == 1 else [*word[:-1], word[-1] + _END]
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self.rules)))
            if best not in self._ranks:
                break
            symbols = _merged(symbols, best)
        if symbols[-1] == _END:
            symbols.pop()
        else:
            symbols[-1] = symbols[-1].removesuffix(_END)
        if self.kept is None:
            return symbols
        last = len(symbols) - 1
        parts = [part for at, symbol in enumerate(symbols) for part in self._known_parts(symbol, at == last)]
        return [part for part in parts if part]  # in version 0.1 the end of a word is a symbol without text

    def _known_parts(self, symbol: str, ends: bool) -> Iterator[str]:
        """Yields the parts of a subword that the vocabulary has, or those that no rule divides."""
        assert self.kept is not None
        whole = symbol if ends else symbol + _SEPARATOR
        rule = self._parts.get(symbol + _END if ends else symbol)
        if whole in self.kept or rule is None:
            yield symbol
            return
        left, right = rule
        yield from self._known_parts(left, False)
        yield from self._known_parts(right.removesuffix(_END) if ends else right, ends)


def _merged(symbols: Sequence[str], pair: Rule) -> list[str]:
    """Returns the symbols with each occurrence of a pair as one."""
    merged: list[str] = []
    at = 0
    while at < len(symbols):
        found = tuple(symbols[at : at + 2]) == pair
        merged.append("".join(pair) if found else symbols[at])
        at += 2 if found else 1
    return merged


def read_codes(path: Path) -> tuple[list[Rule], int]:
    """Reads rules that subword-nmt's learn-bpe wrote, and the version of their format.

    Raises:
        InputError: the file has no rules, another version, or a line that is not two symbols.
    """
    rules, version = list[Rule](), 1
    for number, line in enumerate(read_lines(path), 1):
        if number == 1 and line.startswith("#version:"):
            match = _VERSION.fullmatch(line.strip())
            if match is None or match[1] not in ("0.1", "0.2"):
                raise InputError(
                    f"{path}:1: codes of an unknown format, '{line[:40]}'; econmt reads 0.1 and 0.2"
                )
            version = int(match[1][-1])
            continue
        parts = line.strip("\r\n ").split(" ")
        if len(parts) != 2 or not all(parts):
            raise InputError(
                f"{path}:{number}: expected two symbols with a space between them, found '{line[:40]}'; give the "
                "codes that subword-nmt learn-bpe wrote"
            )
        rules.append((parts[0], parts[1]))
    if not rules:
        raise InputError(f"{path}: has no merge; give the codes that subword-nmt learn-bpe wrote")
    return rules, version


def read_kept(path: Path, threshold: int) -> list[str]:
    """Reads the subwords of a vocabulary of subword-nmt's get-vocab that occur at least ``threshold`` times, sorted.

    Raises:
        InputError: a line is not a subword and a count, or no subword is frequent enough.
    """
    kept = set()
    for number, line in enumerate(read_lines(path), 1):
        subword, space, digits = line.strip("\r\n ").partition(" ")
        count = limits.natural(digits)
        if not subword or not space or count is None:
            raise InputError(f"{path}:{number}: expected a subword and its count, found '{line[:40]}'")
        if count >= threshold:
            kept.add(subword)
    if not kept:
        raise InputError(f"{path}: has no subword with a count of at least {threshold}")
    return sorted(kept)
