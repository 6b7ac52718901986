"""Prepared data: a recipe's text as a folder of token stores, vocabularies and raw lines, made once and reused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from econmt.data.corpus import Corpus, find_corpus, read_pairs
from econmt.data.files import notice, sync_folder, write_atomically, writing
from econmt.data.progress import Progress
from econmt.data.subwords import (
    Vocabularies,
    fingerprint,
    load_vocabularies,
    train_vocabularies,
    vocabulary_files,
)
from econmt.data.subwords import UNK
from econmt.data.token_store import TokenStore, TokenStoreWriter
from econmt.errors import InputError
from econmt.recipe import Data, Recipe, SentencePieceSubwords

FORMAT = "econmt-data-1"
META_FILE = "meta.json"
_CHUNK_PAIRS = 10_000


@dataclass(frozen=True)
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
    """Counts of pairs, tokens, unknown tokens and pairs left out, by split; see ``econmt prepare``."""


class _Input(NamedTuple):
    split: str
    corpus: Corpus


def prepare(recipe: Recipe, folder: Path, search: Sequence[Path], *, show_progress: bool) -> PreparedData:
    """Turn the recipe's text into a store in ``folder``, or reuse the store that is there if nothing has changed.

    A store is reused when the recipe's data section and the contents of all text files are those it was made from.
    A new one is written under a temporary name, synced and renamed, so that ``folder`` is always whole.

    Args:
        recipe: its data section says which text and how it becomes tokens.
        folder: where the store lies.
        search: folders in which the text is looked up, see :func:`econmt.data.corpus.search_path`.
        show_progress: show bars on stderr if it is a terminal.

    Raises:
        InputError: text that is missing or unusable, or a folder that cannot be written.
    """
    data = recipe.data
    meta = _read_meta(folder)
    try:
        inputs = _find_inputs(data, search, show_progress)
    except InputError as error:
        if meta is None or meta["data"] != _data_settings(data):
            raise
        notice(f"reusing the prepared data in {folder}; its text is no longer there ({error})")
        return open_prepared(folder)
    files = _describe_inputs(inputs, meta, show_progress)
    if meta is not None:
        reason = _why_outdated(meta, data, files)
        if reason is None:
            try:
                return open_prepared(folder)
            except InputError as error:
                reason = str(error)
        notice(f"preparing the data in {folder} again: {reason}")
    _build(data, folder, inputs, files, Progress(show_progress))
    return open_prepared(folder)


def open_prepared(folder: Path) -> PreparedData:
    """Open a store that :func:`prepare` made.

    Raises:
        InputError: ``folder`` holds none, or it is damaged.
    """
    meta = _read_meta(folder)
    if meta is None:
        raise InputError(f"{folder}: no prepared data here; run econmt prepare")
    lines = {split: _read_raw(folder, split) for split in ("valid", "test") if split in meta["splits"]}
    stores = {split: TokenStore(folder, split, description) for split, description in meta["splits"].items()}
    if fingerprint(folder) != meta["vocabulary"]:
        raise InputError(
            f"{folder}: the vocabulary files are not those of the token store; remove the folder"
        )
    subwords = meta["data"]["subwords"]
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
        subword_dropout=float(subwords.get("dropout", 0.0)),
        statistics=meta["statistics"],
    )


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """The store's description; None if ``folder`` holds no store of this format."""
    path = folder / META_FILE
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: damaged description of prepared data ({error}); remove {folder}"
        ) from error
    if not isinstance(meta, dict) or "format" not in meta:
        raise InputError(
            f"{path}: not a description of prepared data; choose another folder or remove {folder}"
        )
    return meta if meta["format"] == FORMAT else None


def _data_settings(data: Data) -> dict[str, Any]:
    settings = data.model_dump(mode="json")
    del settings["prepared"]
    return settings


def _find_inputs(data: Data, search: Sequence[Path], progress: bool) -> list[_Input]:
    wanted = [("train", prefix) for prefix in data.train] + [("valid", data.valid)]
    if data.test is not None:
        wanted.append(("test", data.test))
    return [
        _Input(split, find_corpus(prefix, data.source, data.target, search, progress))
        for split, prefix in wanted
    ]


def _describe_inputs(
    inputs: Sequence[_Input], meta: dict[str, Any] | None, progress: bool
) -> list[dict[str, Any]]:
    """Size, time and SHA-256 of each text file; the sum is taken over from ``meta`` where size and time are unchanged."""
    known = {
        (entry["path"], entry["size"], entry["time"]): entry["sha256"]
        for entry in (meta or {}).get("files", [])
    }
    described = []
    for split, corpus in inputs:
        for path in corpus.files:
            try:
                status = path.stat()
                key = (str(path.resolve()), status.st_size, status.st_mtime_ns)
                checksum = known.get(key) or _sha256(path)
            except OSError as error:
                raise InputError(f"{path}: cannot read: {error.strerror or error}") from error
            described.append(
                {"split": split, "path": key[0], "size": key[1], "time": key[2], "sha256": checksum}
            )
    return described


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _why_outdated(meta: dict[str, Any], data: Data, files: Sequence[dict[str, Any]]) -> str | None:
    settings = _data_settings(data)
    for key, value in settings.items():
        if meta["data"].get(key) != value:
            return f"data.{key} was {meta['data'].get(key)!r} and is {value!r} now"
    if len(meta["files"]) != len(files):
        return "the text has another number of files now"
    for old, new in zip(meta["files"], files, strict=True):
        if (old["split"], old["sha256"]) != (new["split"], new["sha256"]):
            return f"{new['path']} has changed"
    return None


def _build(
    data: Data, folder: Path, inputs: Sequence[_Input], files: list[dict[str, Any]], progress: Progress
) -> None:
    began = time.monotonic()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; the prepared data needs a folder of this name")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / META_FILE).is_file():
        raise InputError(
            f"{folder}: the folder holds other files; choose an empty or new one for prepared data"
        )
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
        partial.mkdir()
        try:
            meta = _write_store(data, partial, inputs, progress)
            meta["files"] = files
            meta["statistics"]["seconds"] = round(time.monotonic() - began, 2)
            write_atomically(
                partial / META_FILE, (json.dumps(meta, indent=1, ensure_ascii=False) + "\n").encode()
            )
            old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
            if folder.is_dir():
                folder.rename(old)
            partial.rename(folder)
            sync_folder(folder.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what preparations that were killed left behind."""
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        process, _, kind = leftover.name.removeprefix(f".{folder.name}.").partition(".")
        if kind in ("partial", "old") and process.isdigit() and not _is_running(int(process)):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_running(process: int) -> bool:
    if os.name != "posix":
        return process != os.getpid()
    try:
        os.kill(process, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write_store(data: Data, folder: Path, inputs: Sequence[_Input], progress: Progress) -> dict[str, Any]:
    train = [corpus for split, corpus in inputs if split == "train"]

    def train_pairs() -> Iterator[tuple[str, str]]:
        pairs = (pair for corpus in train for pair in read_pairs(corpus))
        return progress.count("reading the training text", pairs)

    vocabularies = train_vocabularies(data, train_pairs, folder)
    splits: dict[str, Any] = {}
    statistics: dict[str, Any] = {
        "source_vocabulary": vocabularies.source.size,
        "target_vocabulary": vocabularies.target.size,
    }
    for split in dict.fromkeys(split for split, _ in inputs):
        corpora = [corpus for name, corpus in inputs if name == split]
        writer = _SplitWriter(data, vocabularies, folder, split)
        for corpus in corpora:
            writer.write(corpus, lambda pairs, split=split: progress.count(f"writing {split}", pairs))
        splits[split], statistics[split] = writer.close()
    return {
        "format": FORMAT,
        "data": _data_settings(data),
        "vocabulary": fingerprint(folder),
        "splits": splits,
        "statistics": statistics,
    }


class _SplitWriter:
    """Encodes and writes one split. Training pairs are filtered; valid and test keep all, and their raw lines."""

    def __init__(self, data: Data, vocabularies: Vocabularies, folder: Path, split: str) -> None:
        self._data, self._vocabularies, self._split = data, vocabularies, split
        size = max(vocabularies.source.size, vocabularies.target.size)
        self._store = TokenStoreWriter(folder, split, size)
        self._raw = None
        if split != "train":
            self._raw = [(folder / f"{split}.{side}.txt").open("wb") for side in ("source", "target")]
        self._files: list[str] = []
        self._counts = dict.fromkeys(
            (
                "lines",
                "too_long",
                "empty",
                "source_tokens",
                "target_tokens",
                "source_unknown",
                "target_unknown",
            ),
            0,
        )

    def write(
        self, corpus: Corpus, watch: Callable[[Iterable[tuple[str, str]]], Iterator[tuple[str, str]]]
    ) -> None:
        """Append all pairs of a corpus."""
        self._store.begin_file(corpus.source, corpus.target)
        self._files.append(str(corpus.source))
        pairs = watch(read_pairs(corpus))
        first_line = 1
        while chunk := list(islice(pairs, _CHUNK_PAIRS)):
            self._write_chunk(corpus, chunk, first_line)
            first_line += len(chunk)

    def _write_chunk(self, corpus: Corpus, chunk: Sequence[tuple[str, str]], first_line: int) -> None:
        sources = self._vocabularies.source.encode_many([source for source, _ in chunk])
        targets = self._vocabularies.target.encode_many([target for _, target in chunk])
        lines = list(range(first_line, first_line + len(chunk)))
        self._counts["lines"] += len(chunk)
        if self._raw is not None:
            for column, stream in enumerate(self._raw):
                stream.write("".join(pair[column] + "\n" for pair in chunk).encode())
        else:
            kept = [
                row for row in range(len(chunk)) if self._keep(corpus, sources[row], targets[row], lines[row])
            ]
            sources, targets, lines = ([values[row] for row in kept] for values in (sources, targets, lines))
        for side, rows in (("source", sources), ("target", targets)):
            self._counts[f"{side}_tokens"] += sum(map(len, rows))
            self._counts[f"{side}_unknown"] += sum(row.count(UNK) for row in rows)
        self._store.add(sources, targets, lines)

    def _keep(self, corpus: Corpus, source: Sequence[int], target: Sequence[int], line: int) -> bool:
        if not source or not target:
            if self._data.empty_lines == "error":
                side, path = (
                    ("source", corpus.source) if not source else ("target", corpus.target or corpus.source)
                )
                raise InputError(
                    f"{path}:{line}: the {side} side of this training pair is empty; mend the text, or leave such "
                    "pairs out with data.empty_lines: skip"
                )
            self._counts["empty"] += 1
            return False
        if max(len(source), len(target)) > self._data.max_length:
            self._counts["too_long"] += 1
            return False
        return True

    def close(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sync the files; returns the store's description and the split's statistics.

        Raises:
            InputError: no training pair is left.
        """
        if self._raw is not None:
            for stream in self._raw:
                stream.flush()
                os.fsync(stream.fileno())
                stream.close()
        description = self._store.close()
        counts = self._counts
        if self._split == "train" and not description["pairs"]:
            left_out = f"{counts['too_long']} longer than data.max_length {self._data.max_length} tokens"
            if counts["empty"]:
                left_out += f", {counts['empty']} with an empty side"
            raise InputError(
                f"{', '.join(self._files)}: no training pair is left of {counts['lines']}: {left_out}; raise data.max_length"
            )
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


def length_quantiles(lengths: np.ndarray[Any, Any]) -> list[int]:
    """Smallest, 25 %, 50 %, 75 %, 95 %, 99 % and largest length."""
    return [
        int(value) for value in np.quantile(lengths, [0, 0.25, 0.5, 0.75, 0.95, 0.99, 1], method="higher")
    ]
