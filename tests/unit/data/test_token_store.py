"""Ids come back as they were written, and damaged files are refused."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from econmt.data.batching.token_store import TokenStore, TokenStoreWriter
from econmt.errors import InputError
from tests.unit.data.conftest import write_store

MakeStore = Callable[[Path, Sequence[tuple[int, int]]], TokenStore]
ids = st.lists(st.integers(0, 70_000), max_size=6)


@settings(max_examples=40)
@given(st.lists(st.tuples(ids, ids), max_size=8), st.booleans())
def test_round_trip(pairs: list[tuple[list[int], list[int]]], wide: bool) -> None:
    if not wide:
        pairs = [([i % 1000 for i in source], [i % 1000 for i in target]) for source, target in pairs]
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder), pairs, 70_001 if wide else 1000)
        assert len(store) == len(pairs)
        assert store.source_lengths.tolist() == [len(source) for source, _ in pairs]
        assert store.target_lengths.tolist() == [len(target) for _, target in pairs]
        assert [tuple(side.tolist() for side in store.pair(i)) for i in range(len(pairs))] == pairs


def test_gather_pads_with_zeros(tmp_path: Path) -> None:
    store = write_store(tmp_path, [([5, 6, 7], [8]), ([], [9, 4]), ([3], [])], 100)
    source, source_lengths, target, target_lengths = store.gather(np.array([2, 0, 1]))
    assert source.tolist() == [[3, 0, 0], [5, 6, 7], [0, 0, 0]]
    assert target.tolist() == [[0, 0], [8, 0], [9, 4]]
    assert source_lengths.tolist() == [1, 3, 0]
    assert target_lengths.tolist() == [0, 1, 2]
    assert source.dtype == np.int64


def test_files_take_two_bytes_a_token(tmp_path: Path) -> None:
    write_store(tmp_path, [([1] * 10, [2] * 7)] * 3, 1 << 16)
    assert (tmp_path / "train.tokens").stat().st_size == 3 * 17 * 2
    assert (tmp_path / "train.index").stat().st_size == 3 * 16


def test_written_in_pieces_it_is_the_same(tmp_path: Path) -> None:
    pairs = [([i, i + 1][: i % 3], [i] * (i % 4)) for i in range(9)]
    folders = tmp_path / "whole", tmp_path / "pieces"
    for folder, cuts in zip(folders, ([0, 9], [0, 4, 4, 9]), strict=True):
        folder.mkdir()
        writer = TokenStoreWriter(folder, "train", 100)
        writer.begin_file(Path("a"), None)
        for first, end in itertools.pairwise(cuts):
            part = pairs[first:end]
            writer.add(
                [source for source, _ in part],
                [target for _, target in part],
                list(range(first + 1, end + 1)),
            )
        writer.finish()
        writer.close()
    for name in ("train.tokens", "train.index", "train.lines"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_location_names_file_and_line(tmp_path: Path) -> None:
    writer = TokenStoreWriter(tmp_path, "train", 100)
    writer.begin_file(Path("one.en"), Path("one.de"))
    writer.add([[1], [2]], [[1], [2]], [1, 4])
    writer.begin_file(Path("empty.en"), Path("empty.de"))
    writer.begin_file(Path("two.tsv"), None)
    writer.add([[3]], [[3]], [2])
    store = TokenStore(tmp_path, "train", writer.finish())
    writer.close()
    assert [store.location(i) for i in range(3)] == ["one.en:1", "one.en:4", "two.tsv:2"]


@pytest.mark.parametrize("name", ["train.tokens", "train.index", "train.lines"])
@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_damaged_files(tmp_path: Path, make_store: MakeStore, name: str, damage: str) -> None:
    make_store(tmp_path, [(3, 4), (5, 6)])
    description = {"pairs": 2, "tokens": 18, "type": "<u4", "files": [["a", "b", 0]], "corpora": [0]}
    TokenStore(tmp_path, "train", description)
    file = tmp_path / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "short" else file.read_bytes() + b"\0")
    with pytest.raises(InputError, match=name):
        TokenStore(tmp_path, "train", description)


def test_cut_short_while_in_use(tmp_path: Path, make_store: MakeStore) -> None:
    store = make_store(tmp_path, [(3, 4), (5, 6)])
    with (tmp_path / "train.tokens").open("r+b") as stream:
        stream.truncate(40)
    assert store.pair(0)[0].tolist() == [1000, 1001, 1002]
    with pytest.raises(InputError, match="truncated while in use"):
        store.pair(1)


def test_lengths_survive_giving_pages_back(tmp_path: Path, make_store: MakeStore) -> None:
    store = make_store(tmp_path, [(3, 4), (5, 6)])
    lengths = store.source_lengths
    store.release()
    assert lengths.tolist() == [3, 5]
