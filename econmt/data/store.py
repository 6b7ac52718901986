"""Prepared data: a recipe's text as a folder of token stores, vocabularies and raw lines, made once and reused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from itertools import compress, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from econmt.data.corpus import Corpus, find_corpus, find_text, read_lines, read_pairs
from econmt.data.files import notice, refuse_pipe, whole_folder, writing
from econmt.data.filters import KEPT, REASONS, Codes, LeftOut, Selection, no_pair_left
from econmt.data.filters import left_out as left_out
from econmt.data.fingerprints import describe, is_as_described
from econmt.data.progress_bars import counted, counting, told
from econmt.data.store_schema import StoreDescription
from econmt.data.subwords import (
    EOS,
    UNK,
    Vocabularies,
    fingerprint,
    load_vocabularies,
    split_words,
    train_vocabularies,
    vocabulary_files,
)
from econmt.data.token_store import TokenStore, TokenStoreWriter
from econmt.errors import InputError
from econmt.recipe import Data, Recipe, SentencePieceSubwords, TextData, model_folder
from econmt.typed_json import parse_json
from econmt.typed_yaml import check_section

FORMAT = "econmt-data-1"
META_FILE = "meta.json"
_OWN = re.compile(
    r"meta\.json|left-out\.txt|(train|valid|test)\.(tokens|index|lines|source\.txt|target\.txt)|(subwords|vocab)(\.source|\.target)?\.(model|txt)"
)
"""Names of the files of a store; a folder that holds others is never written anew."""
_CHUNK_PAIRS = 10_000


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """What training reads."""

    folder: Path
    vocabularies: Vocabularies
    train: TokenStore
    valid: TokenStore
    valid_source: list[str]
    """Raw source lines of the validation text, as read."""
    valid_target: list[str]
    """Raw target lines: the references."""
    test: TokenStore | None
    test_source: list[str]
    test_target: list[str]
    vocabulary_files: list[Path]
    subword_dropout: float
    """Probability of BPE-dropout; 0: none."""
    statistics: dict[str, Any]
    """Counts of pairs, tokens, unknown tokens and pairs left out, by split, and of a language model's text its words,
    ends of lines counted; see ``econmt prepare``."""
    checksums: dict[str, str]
    """SHA-256 of each file of the store, by name."""


_Input = tuple[str, Corpus]
"""A text and the split that it belongs to."""


def prepare(
    recipe: Recipe, folder: Path, search: Sequence[Path], *, show_progress: bool, verify: bool = False
) -> PreparedData:
    """Turn the recipe's text into a store in ``folder``, or reuse the one there if nothing has changed.

    A store is reused when the recipe's data section and the contents of all text files are those it was made
    from. A new one is written under a temporary name, synced and renamed, so that ``folder`` is always whole.

    Args:
        recipe: its data section says which text and how it becomes tokens.
        folder: where the store lies. search: see :func:`econmt.data.corpus.search_path`.
        show_progress: show bars on stderr if it is a terminal.
        verify: read all of the text and of the store to see whether they are what they were; otherwise their sizes,
            times and a sample are compared, see :mod:`econmt.data.fingerprints`.

    Raises:
        InputError: text that is missing or unusable, or a folder that cannot be written.
    """
    data = recipe.data
    meta = _read_meta(folder)
    fits = meta is not None and meta["data"] == _data_settings(data)
    try:
        inputs = _find_inputs(data, search, show_progress, fetch=not fits)
    except InputError:
        if not fits:
            raise
        notice(
            f"using the prepared data in {folder}; its text is not here, so it was not looked at for changes"
        )
        return dataclasses.replace(
            open_prepared(folder, verify=verify), subword_dropout=_subword_dropout(data)
        )
    files = _describe_inputs(inputs, meta, verify)
    if meta is not None:
        reason = _why_outdated(meta, data, files)
        if reason is None:
            try:
                return dataclasses.replace(
                    open_prepared(folder, verify=verify), subword_dropout=_subword_dropout(data)
                )
            except InputError as error:
                reason = str(error)
        notice(f"preparing the data in {folder} again: {reason}")
    _build(data, folder, inputs, files, show_progress)
    return open_prepared(folder)


def reopen(recipe: Recipe, folder: Path) -> PreparedData:
    """What :func:`prepare` has just left in ``folder``, for another process of the same run."""
    return dataclasses.replace(open_prepared(folder), subword_dropout=_subword_dropout(recipe.data))


def holds_text_of(recipe: Recipe, folder: Path) -> bool:
    """Whether ``folder`` holds a store of the recipe's text, cut as the recipe says; the text is not looked at."""
    try:
        meta = _read_meta(folder)
    except InputError:
        return False
    return meta is not None and meta["data"] == _data_settings(recipe.data)


def store_folder(recipe: Recipe) -> Path:
    """Where a recipe's store lies: ``data.prepared``, or ``prepared`` in the model folder."""
    return model_folder(recipe) / "prepared" if recipe.data.prepared is None else Path(recipe.data.prepared)


def open_prepared(folder: Path, *, verify: bool = False) -> PreparedData:
    """Open a store that :func:`prepare` made; ``verify``: read all of it to see whether it is as it was written.

    Raises:
        InputError: ``folder`` holds none, or it is damaged.
    """
    meta = _read_meta(folder)
    if meta is None:
        raise InputError(f"{folder}: no prepared data here; run econmt prepare")
    lines = {split: _read_raw(folder, split) for split in ("valid", "test") if split in meta["splits"]}
    stores = {split: TokenStore(folder, split, description) for split, description in meta["splits"].items()}
    for split, sides in lines.items():
        if {len(side) for side in sides} != {len(stores[split])}:
            raise InputError(f"{folder}: the {split} text is not that of the token store; remove the folder")
    if fingerprint(folder) != meta["vocabulary"]:
        raise InputError(
            f"{folder}: the vocabulary files are not those of the token store; remove the folder"
        )
    for name, description in meta.get("store", {}).items():
        if not is_as_described(folder / name, description, verify=verify):
            raise InputError(f"{folder / name}: is not as it was written; remove {folder}")
    return PreparedData(
        folder=folder,
        vocabularies=load_vocabularies(folder),
        train=stores["train"],
        valid=stores["valid"],
        valid_source=lines["valid"][0],
        valid_target=lines["valid"][1],
        test=stores.get("test"),
        test_source=lines["test"][0] if "test" in lines else [],
        test_target=lines["test"][1] if "test" in lines else [],
        vocabulary_files=vocabulary_files(folder),
        subword_dropout=float(meta["subword_dropout"]),
        statistics=meta["statistics"],
        checksums={name: entry["sha256"] for name, entry in _described(folder, meta).items()},
    )


def _described(folder: Path, meta: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The descriptions of a store's files; one of an earlier version has none, so that they are made."""
    if "store" in meta:
        found: dict[str, dict[str, Any]] = meta["store"]
        return found
    own = (path for path in folder.iterdir() if _OWN.fullmatch(path.name))
    return {path.name: describe(path) for path in own if path.name != META_FILE}


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """The store's description; None if ``folder`` holds no store of this format."""
    path = folder / META_FILE
    advice = f"it describes no prepared data, or is damaged: choose another folder or remove {folder}"
    for each in folder.iterdir() if folder.is_dir() else ():
        if _OWN.fullmatch(each.name):
            refuse_pipe(each)
    try:
        meta = parse_json(path.read_bytes(), str(path), advice)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if meta.get("format") != FORMAT and isinstance(meta.get("format"), str):
        return None
    check_section(StoreDescription, meta, str(path), advice)
    return meta


def _data_settings(data: Data | TextData) -> dict[str, Any]:
    """What the store depends on: all of the section but its own place and what is drawn while training."""
    settings = data.model_dump(mode="json")
    del settings["prepared"]
    settings["subwords"].pop("dropout", None)
    if isinstance(data, Data):
        # What asks for nothing is left out: a store of an earlier version does not know it.
        idle = {"tags": not any(data.tags), "filters": data.filters.is_idle}
        for key in ("noise", "mixing", *(key for key, asks_nothing in idle.items() if asks_nothing)):
            del settings[key]
    return settings


def _subword_dropout(data: Data | TextData) -> float:
    return data.subwords.dropout if isinstance(data.subwords, SentencePieceSubwords) else 0.0


def _find_inputs(
    data: Data | TextData, search: Sequence[Path], progress: bool, *, fetch: bool
) -> list[_Input]:
    wanted = [*(("train", prefix) for prefix in data.train), ("valid", data.valid)]
    wanted += [] if data.test is None else [("test", data.test)]
    if isinstance(data, TextData):
        return [
            (split, Corpus(find_text(f"{prefix}.{data.text}", search, progress, fetch=fetch), None))
            for split, prefix in wanted
        ]
    return [
        (split, find_corpus(prefix, data.source, data.target, search, progress, fetch=fetch))
        for split, prefix in wanted
    ]


def _describe_inputs(
    inputs: Sequence[_Input], meta: dict[str, Any] | None, verify: bool
) -> list[dict[str, Any]]:
    """Each text file and what it holds; as ``meta`` says where the file is still the same."""
    known = {entry["path"]: entry for entry in (meta or {}).get("files", [])}
    described = []
    for split, corpus in inputs:
        for path in corpus.files:
            place = str(path.resolve())
            entry = known.get(place)
            if entry is None or not is_as_described(path, entry, verify=verify):
                entry = describe(path)
            described.append({**entry, "split": split, "path": place})
    return described


def _why_outdated(meta: dict[str, Any], data: Data | TextData, files: Sequence[dict[str, Any]]) -> str | None:
    settings = _data_settings(data)
    for key in dict.fromkeys((*settings, *meta["data"])):
        old, new = meta["data"].get(key), settings.get(key)
        if old != new:
            return f"data.{key} was {old!r} and is {new!r} now"
    if len(meta["files"]) != len(files):
        return "the text has another number of files now"
    for old, new in zip(meta["files"], files, strict=True):
        if (old["split"], old["sha256"]) != (new["split"], new["sha256"]):
            return f"{new['path']} has changed"
    return None


def _build(
    data: Data | TextData,
    folder: Path,
    inputs: Sequence[_Input],
    files: list[dict[str, Any]],
    progress: bool,
) -> None:
    began = time.monotonic()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; the prepared data needs a folder of this name")
    foreign = (
        [path.name for path in folder.iterdir() if not _OWN.fullmatch(path.name)] if folder.is_dir() else []
    )
    if foreign or (folder.is_dir() and any(folder.iterdir()) and not (folder / META_FILE).is_file()):
        named = f" ({', '.join(sorted(foreign)[:3])})" if foreign else ""
        raise InputError(
            f"{folder}: the folder holds other files{named}; move them, or choose an empty or new one for prepared data"
        )
    with writing(folder), whole_folder(folder) as partial:
        meta = _write_store(data, partial, inputs, progress)
        meta["files"] = files
        meta["store"] = {path.name: describe(path) for path in sorted(partial.iterdir())}
        meta["statistics"]["seconds"] = round(time.monotonic() - began, 2)
        (partial / META_FILE).write_text(
            json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _read(data: Data | TextData, corpus: Corpus, tag: str = "") -> Iterator[tuple[str, str]]:
    """The pairs of a corpus, a tag before each source that is not blank; a language model's lines have no source."""
    if isinstance(data, TextData):
        return (("", line) for line in read_lines(corpus.source))
    pairs = read_pairs(corpus)
    if not tag:
        return pairs
    return ((f"{tag} {source}" if source.strip() else source, target) for source, target in pairs)


class _Training(NamedTuple):
    """A training corpus, its tag, and why pairs of it are left out, None where nothing looked at them."""

    corpus: Corpus
    tag: str = ""
    codes: Codes | None = None

    def kept(self, data: Data | TextData) -> Iterator[tuple[str, str]]:
        """The pairs that a vocabulary is learnt from."""
        pairs = _read(data, self.corpus, self.tag)
        return pairs if self.codes is None else compress(pairs, self.codes == KEPT)


def _training(data: Data | TextData, corpora: Sequence[Corpus], progress: bool) -> list[_Training]:
    if isinstance(data, TextData):
        return [_Training(corpus) for corpus in corpora]
    codes: list[Codes] | list[None] = [None] * len(corpora)
    if not data.filters.is_idle:
        with counting("filtering the text", None, "pairs read", show=progress) as more:
            codes = Selection(data, corpora, more).codes
    return [
        _Training(corpus, data.tag(number), own)
        for number, (corpus, own) in enumerate(zip(corpora, codes, strict=True))
    ]


def _write_store(
    data: Data | TextData, folder: Path, inputs: Sequence[_Input], progress: bool
) -> dict[str, Any]:
    train = _training(data, [corpus for split, corpus in inputs if split == "train"], progress)

    with counting("learning the vocabulary", None, "pairs read", show=progress) as more:

        def train_pairs() -> Iterator[tuple[str, str]]:
            return told((pair for each in train for pair in each.kept(data)), more)

        vocabularies = train_vocabularies(data, train_pairs, folder)
    splits: dict[str, Any] = {}
    statistics: dict[str, Any] = {
        "source_vocabulary": vocabularies.source.size,
        "target_vocabulary": vocabularies.target.size,
    }
    for split in dict.fromkeys(split for split, _ in inputs):
        with contextlib.closing(_SplitWriter(data, vocabularies, folder, split)) as writer:
            others = [_Training(corpus) for name, corpus in inputs if name == split]
            for each in train if split == "train" else others:
                writer.write(each, progress)
            splits[split], statistics[split] = writer.finish()
    return {
        "format": FORMAT,
        "data": _data_settings(data),
        "subword_dropout": _subword_dropout(data),
        "vocabulary": fingerprint(folder),
        "splits": splits,
        "statistics": statistics,
    }


class _SplitWriter:
    """Encodes and writes one split: training pairs are filtered, valid and test keep all, and their raw lines.

    Of a language model's text all lines are kept, and each one's end is a token of it.
    """

    COUNTS = (
        "lines",
        *REASONS,
        "source_tokens",
        "target_tokens",
        "source_unknown",
        "target_unknown",
        "words",
    )

    def __init__(self, data: Data | TextData, vocabularies: Vocabularies, folder: Path, split: str) -> None:
        self._data, self._vocabularies, self._split = data, vocabularies, split
        self._folder, self._dropped = folder, LeftOut()
        size = max(vocabularies.source.size, vocabularies.target.size)
        self._opened = contextlib.ExitStack()
        self._store = self._opened.enter_context(contextlib.closing(TokenStoreWriter(folder, split, size)))
        sides = () if split == "train" else ("source", "target")
        self._raw: list[IO[bytes]] = [
            self._opened.enter_context((folder / f"{split}.{side}.txt").open("wb")) for side in sides
        ]
        self._files: list[str] = []
        self._counts = dict.fromkeys(self.COUNTS, 0)

    def close(self) -> None:
        """Close the files, finished or not."""
        self._opened.close()

    def write(self, given: _Training, progress: bool) -> None:
        """Append all pairs of a corpus."""
        self._store.begin_corpus()
        done = 0
        for part in given.corpus.parts:
            self._store.begin_file(part.source, part.target)
            self._files.append(str(part.source))
            pairs = counted(f"writing {self._split}", _read(self._data, part, given.tag), show=progress)
            first_line = 1
            while chunk := list(islice(pairs, _CHUNK_PAIRS)):
                codes = [KEPT] * len(chunk)
                if given.codes is not None:
                    codes = given.codes[done : done + len(chunk)].tolist()
                self._write_chunk(part, chunk, first_line, codes)
                first_line += len(chunk)
                done += len(chunk)

    def _write_chunk(
        self, corpus: Corpus, chunk: Sequence[tuple[str, str]], first_line: int, codes: Sequence[int]
    ) -> None:
        sources = self._vocabularies.source.encode_many([source for source, _ in chunk])
        targets = self._vocabularies.target.encode_many([target for _, target in chunk])
        lines = list(range(first_line, first_line + len(chunk)))
        if isinstance(self._data, TextData):
            targets = [[*ids, EOS] for ids in targets]
            self._counts["words"] += sum(len(split_words(line)) + 1 for _, line in chunk)
        self._counts["lines"] += len(chunk)
        for column, stream in enumerate(self._raw):
            stream.write("".join(pair[column] + "\n" for pair in chunk).encode())
        if self._split == "train" and isinstance(self._data, Data):
            keep = []
            for source, target, line, code, pair in zip(sources, targets, lines, codes, chunk, strict=True):
                reason = (
                    self._reason(self._data, corpus, source, target, line)
                    if code == KEPT
                    else REASONS[code - 1]
                )
                keep.append(reason is None)
                if reason is not None:
                    self._dropped.add(reason, f"{corpus.source}:{line}", pair)
            sources, targets = list(compress(sources, keep)), list(compress(targets, keep))
            lines = list(compress(lines, keep))
        for side, sentences in (("source", sources), ("target", targets)):
            self._counts[f"{side}_tokens"] += sum(map(len, sentences))
            self._counts[f"{side}_unknown"] += sum(ids.count(UNK) for ids in sentences)
        self._store.add(sources, targets, lines)

    def _reason(
        self, data: Data, corpus: Corpus, source: Sequence[int], target: Sequence[int], line: int
    ) -> str | None:
        """Why a pair that no filter took is left out all the same."""
        if not source or not target:
            if data.empty_lines == "error":
                side = "target" if source else "source"
                path = corpus.files[-1] if source else corpus.source
                raise InputError(
                    f"{path}:{line}: the {side} side of this training pair is empty; mend the text, or leave such "
                    "pairs out with data.empty_lines: skip"
                )
            return "empty"
        return "too_long" if max(len(source), len(target)) > data.max_length else None

    def finish(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sync the files; returns the store's description and the split's statistics.

        Raises:
            InputError: no training pair is left.
        """
        for stream in self._raw:
            stream.flush()
            os.fsync(stream.fileno())
        description = self._store.finish()
        counts = self._counts
        if self._split == "train" and isinstance(self._data, Data):
            counts |= self._dropped.counts
            if not description["pairs"]:  # a language model's text without lines is refused when it is read
                raise no_pair_left(self._files, counts, self._data)
            self._dropped.write(self._folder, self._data, counts["lines"])
        return description, {"pairs": description["pairs"], **counts}


def _read_raw(folder: Path, split: str) -> tuple[list[str], list[str]]:
    sides = []
    for side in ("source", "target"):
        path = folder / f"{split}.{side}.txt"
        try:
            sides.append(path.read_bytes().decode("utf-8").split("\n")[:-1])
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: the prepared data is damaged ({error}); remove {folder}") from error
    return sides[0], sides[1]
