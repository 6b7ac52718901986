"""Files and folders appear complete or not at all, and an error leaves what was there."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from econmt.data.files import sync_folder, whole_file, whole_folder, write_atomically, writing
from econmt.errors import InputError


def test_a_file_appears_when_it_is_complete_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    with whole_file(tmp_path / "link") as stream:
        stream.write(b"new")
        stream.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
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


def test_a_folder_replaces_the_one_before_and_what_killed_processes_left(tmp_path: Path) -> None:
    for name in ("folder", ".folder.4194305.partial", ".other.4194305.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_bytes(b"")
    with whole_folder(tmp_path / "folder") as partial:
        (partial / "new").write_bytes(b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.4194305.partial", "folder"]
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["new"]
    strange = {f".folder.{number}.partial" for number in ("²", "٣", "9" * 200)}
    for name in strange | {f".folder.{'9' * 15}.partial"}:
        (tmp_path / name).mkdir()
    with whole_folder(tmp_path / "folder") as partial:
        (partial / "newer").write_bytes(b"")
    assert {path.name for path in tmp_path.iterdir()} == {*strange, ".other.4194305.partial", "folder"}


def test_what_a_running_process_fills_stays(tmp_path: Path) -> None:
    others = [f".folder.{os.getppid()}.{kind}" for kind in ("partial", "old")]
    for name in others:
        (tmp_path / name).mkdir()
    with whole_folder(tmp_path / "folder"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "folder"])


def test_a_folder_that_cannot_be_renamed_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_bytes(b"")
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(InputError, match="Input/output error"), whole_folder(tmp_path / "folder") as partial:
        (partial / "new").write_bytes(b"")
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert names == ["folder", "folder/old"]


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


def test_a_file_is_written_with_its_folder(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b" / "file", b"content")
    assert (tmp_path / "a/b/file").read_bytes() == b"content"
    assert len(list(tmp_path.rglob("*"))) == 3


def test_a_killed_process_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / ".file.4194305.partial").write_bytes(b"a")
    with whole_file(tmp_path / "file") as stream:
        stream.write(b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
