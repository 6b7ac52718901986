"""Token store: ids of sentence pairs in flat files that open instantly and occupy no memory.

A split NAME consists of little-endian files without headers, whose sizes are checked on opening. The target ids of a
pair directly follow its source ids.

| file | type | values |
|---|---|---|
| NAME.tokens | uint16, or uint32 or uint64 if an id needs it | source ids, target ids of pair 0, of pair 1, ... |
| NAME.index | int64, int32, int32 | where each pair starts in NAME.tokens, its source length, its target length |
| NAME.lines | uint32 | line of the pair in its file, from 1 |
| NAME.weights | uint32 | weight of the pair in millionths, in stores with ``data.weights`` only |

The index is memory-mapped for passes over all lengths. Single pairs, which training reads at random, are read with
``pread`` instead: touched pages of a mapping count as resident memory, and kernels map 64 KiB to 2 MiB around each
access, so that random pairs would cost hundreds of megabytes. Both use the kernel's page cache.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.errors import InputError

IntArray = npt.NDArray[np.integer[Any]]

INDEX_TYPE = np.dtype([("start", "<i8"), ("source", "<i4"), ("target", "<i4")])
LINE_TYPE = np.dtype("<u4")
WEIGHT_TYPE = np.dtype("<u4")


class StoreFile(NamedTuple):
    """Text files of a part of the store, and the index of its first pair."""

    source: str
    target: str | None
    first_pair: int


class PairIds(NamedTuple):
    """Ids of B pairs without ``<s>`` and ``</s>``, padded with zeros."""

    source: IntArray
    """(B, longest) int64."""
    source_lengths: IntArray
    """(B,) int64."""
    target: IntArray
    """(B, longest) int64."""
    target_lengths: IntArray
    """(B,) int64."""

    def lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """Returns both sides as lists of ids without padding."""
        sources = [row[:end].tolist() for row, end in zip(self.source, self.source_lengths, strict=True)]
        targets = [row[:end].tolist() for row, end in zip(self.target, self.target_lengths, strict=True)]
        return sources, targets


def rectangle(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns rows of ids padded with zeros, (B, longest), and their lengths, (B,)."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    ids = np.zeros((len(rows), int(lengths.max(initial=0))), dtype=np.int64)
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = [i for row in rows for i in row]
    return ids, lengths


def token_type(vocabulary_size: int) -> np.dtype[Any]:
    """Returns the smallest integer type for the ids of a vocabulary, or for joint ids with factors."""
    sizes = {1 << 16: "<u2", 1 << 32: "<u4"}
    return np.dtype(next((name for most, name in sizes.items() if vocabulary_size <= most), "<u8"))


def length_quantiles(lengths: IntArray) -> list[int]:
    """Returns the minimum, 25 %, 50 %, 75 %, 95 % and 99 % quantiles, and maximum of lengths (N,)."""
    values: list[int] = np.quantile(lengths, [0, 0.25, 0.5, 0.75, 0.95, 0.99, 1], method="higher").tolist()
    return values


class _PositionalFile:
    """File of ``count`` values of one type, read by position; can be shared by threads and forked processes."""

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
        """Reads the values ``first`` to ``first + count`` as bytes."""
        size = self.dtype.itemsize
        if hasattr(os, "pread"):
            content = os.pread(self.descriptor, count * size, first * size)
        else:
            os.lseek(self.descriptor, first * size, os.SEEK_SET)
            content = os.read(self.descriptor, count * size)
        if len(content) != count * size:
            raise InputError(f"{self.path}: the file was truncated while in use; prepare the data again")
        return content


class TokenStore:
    """Sentence pairs of one split as ids, without ``<s>`` and ``</s>``."""

    def __init__(self, folder: Path, name: str, description: dict[str, Any]) -> None:
        """Opens a split; ``description`` comes from :meth:`TokenStoreWriter.finish`."""
        self.name = name
        self._files = [StoreFile(*entry) for entry in description["files"]]
        self.corpora: list[int] = description["corpora"]
        """Index of the first pair of each corpus, in the order of the recipe."""
        self._count, self.total_tokens = int(description["pairs"]), int(description["tokens"])
        self._tokens = _PositionalFile(
            folder / f"{name}.tokens", np.dtype(description["type"]), self.total_tokens
        )
        self._index = _PositionalFile(folder / f"{name}.index", INDEX_TYPE, self._count)
        self._lines = _PositionalFile(folder / f"{name}.lines", LINE_TYPE, self._count)
        self.weighted = bool(description.get("weighted"))
        """True if pairs have weights."""
        self._weights: _PositionalFile | None = None
        if self.weighted:
            self._weights = _PositionalFile(folder / f"{name}.weights", WEIGHT_TYPE, self._count)
        self._map = mmap.mmap(self._index.descriptor, 0, access=mmap.ACCESS_READ) if self._count else None
        self._mapped = np.frombuffer(self._map if self._map is not None else b"", dtype=INDEX_TYPE)

    def __len__(self) -> int:
        return self._count

    @property
    def source_lengths(self) -> IntArray:
        """Number of source ids of each pair, (N,) int32, mapped from the index."""
        lengths: IntArray = self._mapped["source"]
        return lengths

    @property
    def target_lengths(self) -> IntArray:
        """Number of target ids of each pair, (N,) int32, mapped from the index."""
        lengths: IntArray = self._mapped["target"]
        return lengths

    def release(self) -> None:
        """Returns the touched memory pages of the lengths to the kernel."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def pair(self, index: int) -> tuple[IntArray, IntArray]:
        """Reads the source and target ids of one pair."""
        ids = self.gather(np.array([index]))
        return ids.source[0], ids.target[0]

    def gather(self, indices: IntArray) -> PairIds:
        """Reads the pairs with these indices (B,)."""
        records = np.frombuffer(
            b"".join([self._index.read(index, 1) for index in indices.tolist()]), dtype=INDEX_TYPE
        )
        lengths = np.stack([records["source"], records["target"]], axis=1).astype(np.int64)
        spans = zip(records["start"].tolist(), lengths.sum(axis=1).tolist(), strict=True)
        flat = np.frombuffer(
            b"".join([self._tokens.read(start, count) for start, count in spans]), self._tokens.dtype
        )
        inside = np.arange(int(lengths.max(initial=0))) < lengths[:, :, None]
        rows = np.zeros(inside.shape, dtype=np.int64)
        rows[inside] = flat
        longest_source, longest_target = lengths.max(axis=0, initial=0).tolist()
        return PairIds(rows[:, 0, :longest_source], lengths[:, 0], rows[:, 1, :longest_target], lengths[:, 1])

    def weights(self, indices: IntArray) -> IntArray | None:
        """Reads the weights of pairs (B,) in millionths, (B,) int64; None in a store without weights."""
        if self._weights is None:
            return None
        content = b"".join([self._weights.read(index, 1) for index in indices.tolist()])
        return np.frombuffer(content, WEIGHT_TYPE).astype(np.int64)

    def tokens(self, first: int, count: int) -> IntArray:
        """Reads ids ``first`` to ``first + count`` of the concatenated split, (count,) int64."""
        return np.frombuffer(self._tokens.read(first, count), self._tokens.dtype).astype(np.int64)

    def pairs_at(self, positions: IntArray) -> IntArray:
        """Returns the indices of the pairs that contain positions (N,) of the concatenated split, (N,)."""
        indices: IntArray = np.searchsorted(self._mapped["start"], positions, side="right") - 1
        return indices

    def location(self, index: int) -> str:
        """Returns the origin of a pair as ``file:line``."""
        origin = next(file for file in reversed(self._files) if file.first_pair <= index)
        return f"{origin.source}:{int(np.frombuffer(self._lines.read(index, 1), LINE_TYPE)[0])}"


class TokenStoreWriter:
    """Incremental writer of one split, which holds nothing in memory; call ``close`` at the end."""

    def __init__(self, folder: Path, name: str, vocabulary_size: int, *, weighted: bool = False) -> None:
        """Creates the files of split ``name``; ``vocabulary_size`` is the larger of both sides."""
        self._weighted = weighted
        self._type = token_type(vocabulary_size)
        self._opened = contextlib.ExitStack()
        self._streams: dict[str, IO[bytes]] = {
            kind: self._opened.enter_context((folder / f"{name}.{kind}").open("wb"))
            for kind in ("tokens", "index", "lines", *(("weights",) if weighted else ()))
        }
        self._files: list[StoreFile] = []
        self._corpora: list[int] = []
        self._pairs = self._tokens = 0

    def close(self) -> None:
        """Closes the files, also if they are incomplete."""
        self._opened.close()

    def begin_corpus(self) -> None:
        """Starts the next corpus."""
        self._corpora.append(self._pairs)

    def begin_file(self, source: Path, target: Path | None) -> None:
        """Starts the pairs of the next text files."""
        self._files.append(StoreFile(str(source), None if target is None else str(target), self._pairs))

    def add(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        lines: Sequence[int],
        weights: Sequence[int] | None = None,
    ) -> None:
        """Appends pairs: ids of both sides, the line of each pair in its file, and its weight in millionths."""
        pairs = zip(sources, targets, strict=True)
        flat = np.array([*chain.from_iterable(chain.from_iterable(pairs))], dtype=self._type)
        source_lengths, target_lengths = (
            np.array([*map(len, side)], np.int64) for side in (sources, targets)
        )
        self.add_arrays(flat, source_lengths, target_lengths, np.asarray(lines))
        if self._weighted:
            assert weights is not None
            self._streams["weights"].write(np.asarray(weights, dtype=WEIGHT_TYPE).data)

    def add_arrays(
        self, tokens: IntArray, source_lengths: IntArray, target_lengths: IntArray, lines: IntArray
    ) -> None:
        """Appends N pairs whose ids are already concatenated: source, target, source, target, ..."""
        lengths = source_lengths.astype(np.int64) + target_lengths
        index = np.empty(len(lengths), dtype=INDEX_TYPE)
        index["start"] = self._tokens + np.cumsum(lengths) - lengths
        index["source"], index["target"] = source_lengths, target_lengths
        arrays = {"tokens": tokens.astype(self._type), "index": index, "lines": lines.astype(LINE_TYPE)}
        for kind, values in arrays.items():
            self._streams[kind].write(values.data)
        self._pairs += len(lengths)
        self._tokens += len(tokens)

    def finish(self) -> dict[str, Any]:
        """Syncs the files; returns the JSON-serialisable description with which :class:`TokenStore` opens them."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        files = [list(file) for file in self._files]
        sizes = {"pairs": self._pairs, "tokens": self._tokens, "type": self._type.str}
        weighted = {"weighted": True} if self._weighted else {}
        return {**sizes, "files": files, "corpora": self._corpora, **weighted}
