"""Files, folders and stores of tokens appear complete or not at all, and damaged ones are refused."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from econmt.data.batching.token_store import TokenStore, TokenStoreWriter
from econmt.data.files import sync_folder, whole_file, whole_folder, write_atomically, writing
from econmt.errors import InputError
from tests.unit.data.conftest import store_of, write_store


def test_a_file_appears_when_it_is_complete_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o750)
    (tmp_path / "link").symlink_to(path)
    with whole_file(tmp_path / "link") as stream:
        stream.write(b"new")
        stream.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "link").is_symlink()


def test_an_interruption_leaves_the_old_file_or_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "folder").mkdir()

    def fill(path: Path) -> None:
        path.write_bytes(b"new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "file") as stream:
        fill(Path(stream.name))
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "folder") as partial:
        fill(partial / "inside")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_what_killed_processes_left_goes_and_what_looks_like_it_or_is_filled_stays(tmp_path: Path) -> None:
    strange = {".other.4194305.partial", *(f".folder.{number}.partial" for number in ("²", "٣", "9" * 200))}
    strange |= {f".folder.{os.getppid()}.{kind}" for kind in ("partial", "old")}  # of a running process
    for name in strange | {f".folder.{'9' * 15}.partial"}:
        (tmp_path / name).mkdir()
    with whole_folder(tmp_path / "folder"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {*strange, "folder"}


WRITING_CALLS = [(Path, name) for name in ("mkdir", "rename", "replace", "unlink", "open")]
WRITING_CALLS += [(os, "fsync"), (os, "open"), (shutil, "rmtree")]


def write_new(path: Path) -> None:
    """Replaces a folder or file, whose content is called old."""
    if path.name == "file":
        write_atomically(path, b"new")
        return
    with whole_folder(path) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "new").write_bytes(b"")


def read_back(path: Path) -> list[str]:
    if path.name == "file":
        return [path.read_text()]
    return sorted(each.name for each in path.rglob("*") if each.is_file())


@pytest.mark.parametrize("name", ["file", "folder"])
@pytest.mark.parametrize("faults", [1, 99])
def test_a_failing_call_leaves_the_old_or_the_new_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, faults: int
) -> None:
    """Each call fails in turn, alone or with all that follow; what is there then is replaced as if nothing had been."""
    calls, failing = 0, range(0)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls - 1 in failing:
                raise OSError(errno.EIO, "Input/output error")
            return call(*arguments, **named)

        return run

    with monkeypatch.context() as patch:
        for owner, call in WRITING_CALLS:
            patch.setattr(owner, call, counted(getattr(owner, call)))
        path, at, told = tmp_path / "0" / name, 0, 0
        while calls >= at:
            failing, path = range(0), tmp_path / str(at) / name
            path.parent.mkdir()
            if name == "file":
                path.write_bytes(b"old")
                path.chmod(0o640)
            else:
                path.mkdir()
                (path / "old").write_bytes(b"")
            calls, failing = 0, range(at, at + faults)
            with suppress(InputError):
                write_new(path)
                told -= 1
            told, at, failing = told + 1, at + 1, range(0)
            if path.exists():
                assert read_back(path) in (["old"], ["new"])
            else:  # the folder could not be put back, either
                (aside,) = path.parent.glob(".folder.*.old")
                assert faults > 1
                assert read_back(aside) == ["old"]
                aside.rename(path)
            if faults == 1:
                assert not [*path.parent.glob(".*.partial")]
            for leftover in path.parent.glob(".*"):  # of a process that has ended
                leftover.rename(leftover.with_name(leftover.name.replace(f".{os.getpid()}.", ".4194305.")))
            write_new(path)
            assert read_back(path) == ["new"]
            assert [each.name for each in path.parent.iterdir()] == [name]
            assert name == "folder" or path.stat().st_mode & 0o777 == 0o640
        assert told > 3


def test_a_folder_that_cannot_be_synced_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = []

    def fail(descriptor: int) -> None:
        descriptors.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "place: the disk is full; free some space and run the same command again"),
        (errno.EDQUOT, "place: the disk is full"),
        (
            errno.EFBIG,
            "place: a file is too large; allow larger files (ulimit -f) and run the same command again",
        ),
        (errno.EACCES, "place: no permission to write name; choose another folder"),
        (errno.EROFS, "place: no permission to write name"),
        (errno.EEXIST, "place: cannot create this folder, because name is a file; choose another name"),
        (errno.ENOTDIR, "place: cannot create this folder, because name is a file"),
        (errno.EIO, f"place: cannot write: {os.strerror(errno.EIO)}"),
    ],
)
def test_errors_while_writing_name_the_place_and_the_remedy(code: int, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)), writing(Path("place")):
        raise OSError(code, os.strerror(code), "name")
    with pytest.raises(BrokenPipeError), writing(Path("place")):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


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
def test_damaged_files(tmp_path: Path, name: str, damage: str) -> None:
    store_of(tmp_path, [(3, 4), (5, 6)])
    description = {"pairs": 2, "tokens": 18, "type": "<u4", "files": [["a", "b", 0]], "corpora": [0]}
    TokenStore(tmp_path, "train", description)
    file = tmp_path / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "short" else file.read_bytes() + b"\0")
    with pytest.raises(InputError, match=name):
        TokenStore(tmp_path, "train", description)


def test_cut_short_while_in_use_and_lengths_after_pages_were_given_back(tmp_path: Path) -> None:
    store = store_of(tmp_path, [(3, 4), (5, 6)])
    lengths = store.source_lengths
    store.release()
    assert lengths.tolist() == [3, 5]
    with (tmp_path / "train.tokens").open("r+b") as stream:
        stream.truncate(40)
    assert store.pair(0)[0].tolist() == [1000, 1001, 1002]
    with pytest.raises(InputError, match="truncated while in use"):
        store.pair(1)
