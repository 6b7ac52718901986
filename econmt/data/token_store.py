"""Token ids of many sentence pairs in flat files, memory-mapped: opening is instant, reading touches few pages.

One split NAME is five little-endian arrays without headers; their lengths follow from the number of pairs and are
checked on opening. A pair is stored as its source ids directly followed by its target ids, so that fetching one
touches one place of the large file.

| file | type | values |
|---|---|---|
| NAME.tokens | uint16, or uint32 if an id needs it | source ids, target ids of pair 0, of pair 1, ... |
| NAME.offsets | int64 | where each pair starts in NAME.tokens, and the total at the end |
| NAME.source_lengths, NAME.target_lengths | int32 | number of ids of each side |
| NAME.lines | uint32 | line of the pair in its file, from 1 |

Pages of a mapped file count as resident memory of the process once touched. ``release`` gives them back (the
kernel keeps them in its page cache), so that a training process stays small however long it runs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.errors import InputError

IntArray = npt.NDArray[np.integer[Any]]

OFFSET_TYPE, LENGTH_TYPE, LINE_TYPE = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<u4")


class StoreFile(NamedTuple):
    """A file pair of the text and the first of its pairs in the store."""

    source: str
    target: str | None
    first_pair: int


def token_type(vocabulary_size: int) -> np.dtype[Any]:
    """Smallest type that holds every id of a vocabulary."""
    return np.dtype("<u2") if vocabulary_size <= 1 << 16 else np.dtype("<u4")


class MappedArray:
    """A read-only array in a file, mapped into memory."""

    def __init__(self, path: Path, dtype: np.dtype[Any], count: int) -> None:
        """Map ``count`` values.

        Raises:
            InputError: the file is missing or has another size.
        """
        expected = count * dtype.itemsize
        try:
            with path.open("rb") as stream:
                actual = os.fstat(stream.fileno()).st_size
                if actual != expected:
                    raise InputError(
                        f"{path}: {actual} bytes instead of {expected}; the token store is damaged, remove its folder"
                    )
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if expected else None
        except OSError as error:
            raise InputError(f"{path}: cannot read the token store: {error.strerror or error}") from error
        buffer = self._map if self._map is not None else b""
        self.values: IntArray = np.frombuffer(buffer, dtype=dtype, count=count)

    def release(self) -> None:
        """Give the pages touched so far back to the kernel; they are read again when needed."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class TokenStore:
    """Sentence pairs as ids, without ``<s>`` and ``</s>``."""

    def __init__(self, folder: Path, name: str, description: dict[str, Any]) -> None:
        """Open a split that :class:`TokenStoreWriter` wrote; ``description`` is what its ``close`` returned.

        Raises:
            InputError: files are missing or damaged.
        """
        self.name = name
        self._files = [StoreFile(*entry) for entry in description["files"]]
        self._count, self.total_tokens = int(description["pairs"]), int(description["tokens"])
        count = self._count
        self._tokens = MappedArray(
            folder / f"{name}.tokens", np.dtype(description["type"]), self.total_tokens
        )
        self._offsets = MappedArray(folder / f"{name}.offsets", OFFSET_TYPE, count + 1)
        self._source_lengths = MappedArray(folder / f"{name}.source_lengths", LENGTH_TYPE, count)
        self._target_lengths = MappedArray(folder / f"{name}.target_lengths", LENGTH_TYPE, count)
        self._lines = MappedArray(folder / f"{name}.lines", LINE_TYPE, count)

    def __len__(self) -> int:
        return self._count

    @property
    def source_lengths(self) -> IntArray:
        """(N,) int32: ids of each source side, mapped from its file."""
        return self._source_lengths.values

    @property
    def target_lengths(self) -> IntArray:
        """(N,) int32: ids of each target side, mapped from its file."""
        return self._target_lengths.values

    def pair(self, index: int) -> tuple[IntArray, IntArray]:
        """Source and target ids of one pair."""
        start, end = int(self._offsets.values[index]), int(self._offsets.values[index + 1])
        middle = start + int(self._source_lengths.values[index])
        return self._tokens.values[start:middle], self._tokens.values[middle:end]

    def gather(self, indices: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Many pairs at once.

        Args:
            indices: (B,) pairs.

        Returns:
            source ids (B, longest) int64, source lengths (B,) int64, target ids, target lengths; what lies past a
            row's length is zero.
        """
        starts = self._offsets.values[indices]
        source_lengths = self._source_lengths.values[indices].astype(np.int64)
        target_lengths = self._target_lengths.values[indices].astype(np.int64)
        source = self._rows(starts, source_lengths)
        target = self._rows(starts + source_lengths, target_lengths)
        return source, source_lengths, target, target_lengths

    def _rows(self, starts: IntArray, lengths: IntArray) -> IntArray:
        columns = np.arange(int(lengths.max(initial=0)), dtype=np.int64)
        inside = columns < lengths[:, None]
        rows = np.zeros(inside.shape, dtype=np.int64)
        rows[inside] = self._tokens.values[(starts[:, None] + columns)[inside]]
        return rows

    def location(self, index: int) -> str:
        """Where a pair comes from, as ``file:line``."""
        origin = next(file for file in reversed(self._files) if file.first_pair <= index)
        return f"{origin.source}:{int(self._lines.values[index])}"

    def release(self) -> None:
        """Give the memory pages touched so far back to the kernel."""
        for array in (self._tokens, self._offsets, self._source_lengths, self._target_lengths, self._lines):
            array.release()


class TokenStoreWriter:
    """Writes one split, piece by piece; nothing is held in memory."""

    def __init__(self, folder: Path, name: str, vocabulary_size: int) -> None:
        """Start the files of split ``name``; ``vocabulary_size`` is the larger one of both sides."""
        self._type = token_type(vocabulary_size)
        self._streams: dict[str, IO[bytes]] = {
            kind: (folder / f"{name}.{kind}").open("wb")
            for kind in ("tokens", "offsets", "source_lengths", "target_lengths", "lines")
        }
        self._files: list[StoreFile] = []
        self._pairs = self._tokens = 0

    @property
    def pairs(self) -> int:
        """Pairs written so far."""
        return self._pairs

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
        source_lengths = np.fromiter(map(len, sources), dtype=LENGTH_TYPE, count=len(sources))
        target_lengths = np.fromiter(map(len, targets), dtype=LENGTH_TYPE, count=len(targets))
        self.add_arrays(np.asarray(flat, dtype=self._type), source_lengths, target_lengths, np.asarray(lines))

    def add_arrays(
        self, tokens: IntArray, source_lengths: IntArray, target_lengths: IntArray, lines: IntArray
    ) -> None:
        """Append pairs whose ids are flat already: source, target, source, target, ..."""
        lengths = source_lengths.astype(np.int64) + target_lengths
        ends = self._tokens + np.cumsum(lengths)
        self._write("tokens", tokens, self._type)
        self._write("offsets", ends - lengths, OFFSET_TYPE)
        self._write("source_lengths", source_lengths, LENGTH_TYPE)
        self._write("target_lengths", target_lengths, LENGTH_TYPE)
        self._write("lines", lines, LINE_TYPE)
        self._pairs += len(lengths)
        self._tokens += len(tokens)

    def _write(self, kind: str, values: IntArray, dtype: np.dtype[Any]) -> None:
        self._streams[kind].write(np.ascontiguousarray(values, dtype=dtype).data)

    def close(self) -> dict[str, Any]:
        """Finish and sync the files.

        Returns:
            The description (JSON-able) with which :class:`TokenStore` opens them.
        """
        self._write("offsets", np.asarray([self._tokens]), OFFSET_TYPE)
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        files = [list(file) for file in self._files]
        return {"pairs": self._pairs, "tokens": self._tokens, "type": self._type.str, "files": files}
