"""Token ids of many sentence pairs in flat files: opening is instant, and reading leaves no memory behind.

One split NAME is three little-endian files without headers; their sizes follow from the number of pairs and of
tokens and are checked on opening. A pair's target ids directly follow its source ids.

| file | type | values |
|---|---|---|
| NAME.tokens | uint16, or uint32 or uint64 if an id needs it | source ids, target ids of pair 0, of pair 1, ... |
| NAME.index | int64, int32, int32 | where each pair starts in NAME.tokens, its source length, its target length |
| NAME.lines | uint32 | line of the pair in its file, from 1 |

The index is memory-mapped for passes over all lengths. Single pairs, which training fetches from all over the
file, are read by position instead: a mapped page counts as resident memory of the process once touched, and
kernels map from 64 KiB to 2 MiB around each touched place, so that a batch of random pairs would cost hundreds of
megabytes. The kernel's page cache serves both.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.errors import InputError

IntArray = npt.NDArray[np.integer[Any]]

INDEX_TYPE = np.dtype([("start", "<i8"), ("source", "<i4"), ("target", "<i4")])
LINE_TYPE = np.dtype("<u4")


class StoreFile(NamedTuple):
    """A file pair of the text and the first of its pairs in the store."""

    source: str
    target: str | None
    first_pair: int


class PairIds(NamedTuple):
    """Ids of B pairs without sentence marks; what lies past a row's length is zero."""

    source: IntArray
    """(B, longest) int64."""
    source_lengths: IntArray
    """(B,) int64."""
    target: IntArray
    """(B, longest) int64."""
    target_lengths: IntArray
    """(B,) int64."""


def rectangle(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows of ids with zeros after each (B, longest), and their lengths (B,)."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    ids = np.zeros((len(rows), int(lengths.max(initial=0))), dtype=np.int64)
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = [i for row in rows for i in row]
    return ids, lengths


def token_type(vocabulary_size: int) -> np.dtype[Any]:
    """Smallest type that holds every id of a vocabulary, or of a vocabulary together with its factors."""
    sizes = {1 << 16: "<u2", 1 << 32: "<u4"}
    return np.dtype(next((name for most, name in sizes.items() if vocabulary_size <= most), "<u8"))


def length_quantiles(lengths: IntArray) -> list[int]:
    """Smallest, 25 %, 50 %, 75 %, 95 %, 99 % and largest of the lengths (N,) of a split's sentences."""
    return [
        int(value) for value in np.quantile(lengths, [0, 0.25, 0.5, 0.75, 0.95, 0.99, 1], method="higher")
    ]


class _PositionalFile:
    """A file of ``count`` values of one type, read by position; threads and forked processes may share it."""

    def __init__(self, path: Path, dtype: np.dtype[Any], count: int) -> None:
        self.path, self.dtype, self.count = path, dtype, count
        try:
            self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise InputError(f"{path}: cannot read the token store: {error.strerror or error}") from error
        weakref.finalize(self, os.close, self.descriptor)
        actual, expected = os.fstat(self.descriptor).st_size, count * dtype.itemsize
        if actual != expected:
            raise InputError(f"{path}: {actual} bytes instead of {expected}; the prepared data is damaged")

    def read(self, first: int, count: int) -> bytes:
        """Values ``first`` to ``first + count``, as bytes."""
        size = self.dtype.itemsize
        content = _read_at(self.descriptor, count * size, first * size)
        if len(content) != count * size:
            raise InputError(f"{self.path}: the file has been cut short while it was in use")
        return content


def _read_at(descriptor: int, size: int, place: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, place)
    os.lseek(descriptor, place, os.SEEK_SET)
    return os.read(descriptor, size)


class TokenStore:
    """Sentence pairs as ids, without ``<s>`` and ``</s>``."""

    def __init__(self, folder: Path, name: str, description: dict[str, Any]) -> None:
        """Open a split that :class:`TokenStoreWriter` wrote; ``description`` is what its ``finish`` returned.

        Raises:
            InputError: files are missing or damaged.
        """
        self.name = name
        self._files = [StoreFile(*entry) for entry in description["files"]]
        # A store of an earlier version has one file, or two sides of one, for each corpus.
        self.corpora: list[int] = description.get("corpora") or [file.first_pair for file in self._files]
        """The first pair of each corpus of the split, in the order of the recipe."""
        self._count, self.total_tokens = int(description["pairs"]), int(description["tokens"])
        self._tokens = _PositionalFile(
            folder / f"{name}.tokens", np.dtype(description["type"]), self.total_tokens
        )
        self._index = _PositionalFile(folder / f"{name}.index", INDEX_TYPE, self._count)
        self._lines = _PositionalFile(folder / f"{name}.lines", LINE_TYPE, self._count)
        self._map = mmap.mmap(self._index.descriptor, 0, access=mmap.ACCESS_READ) if self._count else None
        self._mapped = np.frombuffer(self._map if self._map is not None else b"", dtype=INDEX_TYPE)

    def __len__(self) -> int:
        return self._count

    @property
    def source_lengths(self) -> IntArray:
        """(N,) int32: ids of each source side, mapped from the index."""
        lengths: IntArray = self._mapped["source"]
        return lengths

    @property
    def target_lengths(self) -> IntArray:
        """(N,) int32: ids of each target side, mapped from the index."""
        lengths: IntArray = self._mapped["target"]
        return lengths

    def release(self) -> None:
        """Give the memory pages of the lengths touched so far back to the kernel."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def pair(self, index: int) -> tuple[IntArray, IntArray]:
        """Source and target ids of one pair."""
        ids = self.gather(np.array([index]))
        return ids.source[0], ids.target[0]

    def gather(self, indices: IntArray) -> PairIds:
        """Many pairs at once, those of ``indices`` (B,)."""
        records = np.frombuffer(
            b"".join([self._index.read(index, 1) for index in indices.tolist()]), dtype=INDEX_TYPE
        )
        lengths = np.stack([records["source"], records["target"]], axis=1).astype(np.int64)
        places = zip(records["start"].tolist(), lengths.sum(axis=1).tolist(), strict=True)
        flat = np.frombuffer(
            b"".join([self._tokens.read(start, count) for start, count in places]), self._tokens.dtype
        )
        inside = np.arange(int(lengths.max(initial=0))) < lengths[:, :, None]
        rows = np.zeros(inside.shape, dtype=np.int64)
        rows[inside] = flat
        longest_source, longest_target = lengths.max(axis=0, initial=0).tolist()
        return PairIds(rows[:, 0, :longest_source], lengths[:, 0], rows[:, 1, :longest_target], lengths[:, 1])

    def tokens(self, first: int, count: int) -> IntArray:
        """Ids ``first`` to ``first + count`` of the whole split, (count,) int64: the pairs one after the other."""
        return np.frombuffer(self._tokens.read(first, count), self._tokens.dtype).astype(np.int64)

    def pairs_at(self, places: IntArray) -> IntArray:
        """The pairs in which tokens of the whole split lie, by their places (N,)."""
        found: IntArray = np.searchsorted(self._mapped["start"], places, side="right") - 1
        return found

    def location(self, index: int) -> str:
        """Where a pair comes from, as ``file:line``."""
        origin = next(file for file in reversed(self._files) if file.first_pair <= index)
        return f"{origin.source}:{int(np.frombuffer(self._lines.read(index, 1), LINE_TYPE)[0])}"


class TokenStoreWriter:
    """Writes one split, piece by piece; nothing is held in memory. ``close`` it in the end."""

    def __init__(self, folder: Path, name: str, vocabulary_size: int) -> None:
        """Start the files of split ``name``; ``vocabulary_size`` is the larger one of both sides."""
        self._type = token_type(vocabulary_size)
        self._opened = contextlib.ExitStack()
        self._streams: dict[str, IO[bytes]] = {
            kind: self._opened.enter_context((folder / f"{name}.{kind}").open("wb"))
            for kind in ("tokens", "index", "lines")
        }
        self._files: list[StoreFile] = []
        self._corpora: list[int] = []
        self._pairs = self._tokens = 0

    def close(self) -> None:
        """Close the files, finished or not."""
        self._opened.close()

    def begin_corpus(self) -> None:
        """Say that the files to come are of the next corpus."""
        self._corpora.append(self._pairs)

    def begin_file(self, source: Path, target: Path | None) -> None:
        """Say that the pairs to come are from these files."""
        self._files.append(StoreFile(str(source), None if target is None else str(target), self._pairs))

    def add(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], lines: Sequence[int]
    ) -> None:
        """Append pairs: ids of both sides, and the line of each pair in its file."""
        flat: list[int] = []
        for source, target in zip(sources, targets, strict=True):
            flat.extend(source)
            flat.extend(target)
        source_lengths = np.fromiter(map(len, sources), dtype=np.int64, count=len(sources))
        target_lengths = np.fromiter(map(len, targets), dtype=np.int64, count=len(targets))
        self.add_arrays(np.asarray(flat, dtype=self._type), source_lengths, target_lengths, np.asarray(lines))

    def add_arrays(
        self, tokens: IntArray, source_lengths: IntArray, target_lengths: IntArray, lines: IntArray
    ) -> None:
        """Append N pairs whose ids are flat already: source, target, source, target, ...

        Args:
            tokens: (all ids,). source_lengths, target_lengths, lines: (N,).
        """
        lengths = source_lengths.astype(np.int64) + target_lengths
        index = np.empty(len(lengths), dtype=INDEX_TYPE)
        index["start"] = self._tokens + np.cumsum(lengths) - lengths
        index["source"], index["target"] = source_lengths, target_lengths
        for kind, values in (
            ("tokens", tokens.astype(self._type)),
            ("index", index),
            ("lines", lines.astype(LINE_TYPE)),
        ):
            self._streams[kind].write(values.data)
        self._pairs += len(lengths)
        self._tokens += len(tokens)

    def finish(self) -> dict[str, Any]:
        """Sync the files.

        Returns:
            The description (JSON-able) with which :class:`TokenStore` opens them.
        """
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        files = [list(file) for file in self._files]
        sizes = {"pairs": self._pairs, "tokens": self._tokens, "type": self._type.str}
        return {**sizes, "files": files, "corpora": self._corpora}
