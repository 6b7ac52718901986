"""A runtime in one file translates as its folder does, and leaves no temporary folder behind however it ends."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import econmt_runtime
from econmt.errors import InputError
from econmt.export import runtime
from econmt.export.runtime import export_runtime
from econmt_ops.backends import c as native
from econmt_ops.backends.c import platforms
from econmt_runtime import RuntimeInputError, archive, files
from tests.conftest import PATIENCE, econmt_environment, run_python
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.cli.test_runtime import LINES, write_random_lexicon
from tests.unit.cli.test_runtime import model as model
from tests.unit.cli.test_runtime_folders import refusal, run

TEXT = ("\n".join(LINES) + "\n").encode()


@pytest.fixture(scope="module")
def whole(model: Path) -> Path:
    """The file that is exported of it."""
    return export_runtime(model, model.parent / "whole.pyz")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which this process and those that it starts make temporary folders, which no test leaves there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def test_a_file_translates_as_its_folder(model: Path, call: Call, tmp_path: Path) -> None:
    write_random_lexicon(tmp_path / "lexicon", model)
    folder, file = tmp_path / "runtime", tmp_path / "new" / "runtime.pyz"
    for made in (folder, file):
        more = ["--precision", "int8", "--lexicon", tmp_path / "lexicon", "--lexicon-topk", 5]
        ended = call("export", "--runtime", model, made, *more)
        assert (ended.code, ended.lines) == (0, [str(made)]), ended.err
    assert list(file.parent.iterdir()) == [file]
    for options in (["--score"], ["--shortlist", "0", "--nbest-size", "2", "--threads", "2"]):
        expected, found = run(folder, *options, text=TEXT), run(file, *options, text=TEXT)
        assert (found.returncode, found.stdout, found.stderr) == (0, expected.stdout, b"")
        assert len(expected.stdout) > len(LINES)
    command = [sys.executable, "-m", "econmt_runtime", file, *options]
    done = subprocess.run(command, input=TEXT, env=econmt_environment(), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected.stdout, b"")
    assert econmt_runtime.load(file).translate(LINES) == econmt_runtime.load(folder).translate(LINES)


def test_a_file_takes_the_library_of_its_system(
    model: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_library(folder: Path, name: str) -> None:
        library = native.library_path() if name == platforms.HERE else None
        (folder / f"_kernels.{name}.so").write_bytes(library.read_bytes() if library else b"other")

    monkeypatch.setattr(platforms, "compile_library", compile_library)
    code = (
        "import sys; sys.modules['econmt_ops'] = None  # whose library would do, too\n"
        "import econmt_runtime as e; print(len(e.load(sys.path[1]).translate(['a b'])))"
    )
    other = next(name for name in platforms.PLATFORMS if name != platforms.HERE)
    both = f"{other},{platforms.HERE}"
    for systems, told in ((other, f"again with --platforms {platforms.HERE}"), (both, "")):
        file = tmp_path / f"{len(systems)}.pyz"
        call("export", "--runtime", model, file, "--platforms", systems)
        with zipfile.ZipFile(file) as members:
            held = {member for member in members.namelist() if "_kernels" in member}
        assert held == {f"econmt_runtime/_kernels.{system}.so" for system in systems.split(",")}
        done = run_python("-c", code, env={"PYTHONPATH": str(file)}, check=False)
        assert done.stdout == ("" if told else "1\n")
        assert told in done.stderr
    refused(
        call("export --runtime --platforms beos", model, tmp_path / "new"), "--platforms beos: none of linux"
    )


@pytest.mark.slow
def test_the_library_of_zig_translates_alike(model: Path, whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    made = export_runtime(model, tmp_path / "zig", systems=[platforms.HERE])
    found = run(made, "--score", text=TEXT)
    assert (found.stdout, found.stderr) == (run(whole, "--score", text=TEXT).stdout, b"")


def test_whoever_may_read_a_file_may_run_it(model: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export_runtime(model, tmp_path / "runtime.pyz")
    finally:
        os.umask(before)
    assert (tmp_path / "runtime.pyz").stat().st_mode & 0o777 == 0o750


def test_a_file_holds_the_folder_in_the_same_bytes_each_time(
    model: Path, whole: Path, tmp_path: Path
) -> None:
    again, folder = export_runtime(model, tmp_path / "again.pyz"), export_runtime(model, tmp_path / "runtime")
    assert again.read_bytes() == whole.read_bytes()
    with zipfile.ZipFile(whole) as members:
        listed = members.infolist()
        expected = sorted(path for path in folder.rglob("*") if path.is_file())
        assert [folder / member.filename for member in listed] == expected
        assert [members.read(member) for member in listed] == [path.read_bytes() for path in expected]
    assert {(member.date_time, member.compress_type) for member in listed} == {
        ((1980, 1, 1, 0, 0, 0), zipfile.ZIP_DEFLATED)
    }
    assert whole.stat().st_size < 0.7 * sum(path.stat().st_size for path in expected)


def test_a_file_is_a_program(whole: Path) -> None:
    environment = {**econmt_environment(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    del environment["PYTHONPATH"]
    done = subprocess.run([whole], input=TEXT, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, run(whole, text=TEXT).stdout, b"")


def test_nothing_is_overwritten(model: Path, call: Call, tmp_path: Path) -> None:
    file, folder = tmp_path / "file.pyz", tmp_path / "folder.pyz"
    file.write_bytes(b"kept")
    folder.mkdir()
    for made in (file, folder):
        ended = call("export", "--runtime", model, made)
        assert (ended.code, ended.lines) == (2, [])
        assert f"{made}: exists already; use a new name" in ended.err
    assert file.read_bytes() == b"kept"
    assert list(folder.iterdir()) == []


def test_a_file_is_whole_or_absent(
    model: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = zipfile.ZipFile.writestr, []

    def failing(*arguments: Any) -> None:
        written.append(arguments)
        if len(written) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments)

    monkeypatch.setattr(zipfile.ZipFile, "writestr", failing)
    with pytest.raises(InputError, match="the disk is full"):
        export_runtime(model, tmp_path / "made.pyz")
    assert list(tmp_path.iterdir()) == [temporary]


def test_a_file_holds_at_most_what_the_runtime_unpacks(
    model: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runtime._LARGEST_FILE == files.LARGEST
    with zipfile.ZipFile(whole) as archive:
        size = sum(member.file_size for member in archive.infolist())
    monkeypatch.setattr(runtime, "_LARGEST_FILE", size - 1)
    message = f"{size:,} bytes, more than the {size - 1:,} of one file; export to a folder"
    with pytest.raises(InputError, match=message):
        export_runtime(model, tmp_path / "large.pyz")
    monkeypatch.setattr(runtime, "_LARGEST_FILE", size)
    assert export_runtime(model, tmp_path / "small.pyz").stat().st_size == whole.stat().st_size


def members_of(file: Path) -> dict[str, bytes]:
    """The content of each member of a zip file."""
    with zipfile.ZipFile(file) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def write_members(file: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in members.items():
            made.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def add(name: str) -> Callable[[Path], None]:
    """Returns a fault: a further member."""
    return lambda file: write_members(file, {**members_of(file), name: b"x"})


def change(name: str) -> Callable[[Path], None]:
    """Returns a fault: a member with other content, and the checksum of zip files that fits it."""

    def fault(file: Path) -> None:
        members = members_of(file)
        write_members(file, {**members, name: members[name].replace(b"\0", b"\1").replace(b"e", b"f")})

    return fault


def remove(name: str) -> Callable[[Path], None]:
    """Returns a fault: a missing member."""
    return lambda file: write_members(file, {k: each for k, each in members_of(file).items() if k != name})


def patch(name: str, offset: int, value: bytes) -> Callable[[Path], None]:
    """Returns a fault: other bytes at an offset of a member's entry in the directory of the file."""

    def fault(file: Path) -> None:
        content = bytearray(file.read_bytes())
        at = content.rindex(name.encode()) - 46 + offset
        assert content[at - offset :][:4] == b"PK\1\2"
        content[at : at + len(value)] = value
        file.write_bytes(content)

    return fault


def flip(name: str) -> Callable[[Path], None]:
    """Returns a fault: a changed bit of a member's compressed content."""

    def fault(file: Path) -> None:
        with zipfile.ZipFile(file) as opened:
            at = opened.getinfo(name).header_offset + 30 + len(name) + 200
        content = bytearray(file.read_bytes())
        content[at] ^= 16
        file.write_bytes(content)

    return fault


def repeat(file: Path) -> None:
    """Adds a member that is there already."""
    with zipfile.ZipFile(file, "a") as opened, pytest.warns(UserWarning, match="Duplicate name"):
        opened.writestr(WEIGHTS, b"x")


def shift(file: Path) -> None:
    """Adds to the offset of the directory in the last bytes, so that those of members are negative."""
    content = bytearray(file.read_bytes())
    content[-5] += 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


WEIGHTS, MODULE = "arrays.safetensors", "econmt_runtime/search.py"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "damaged (File is not a zip file); copy it again"),
    "empty": (lambda file: os.truncate(file, 0), "damaged (File is not a zip file)"),
    "flipped weights": (flip(WEIGHTS), "damaged ("),
    "changed weights": (change(WEIGHTS), f"/{WEIGHTS}: not a file written by"),
    "changed configuration": (change("model.json"), "/model.json: "),
    "changed module": (change(MODULE), f"/{MODULE}: "),
    "missing module": (remove(MODULE), f"/{MODULE}: "),
    "flipped module": (flip(MODULE), ""),
    "missing weights": (remove(WEIGHTS), f"/{WEIGHTS}: cannot be read (No such file"),
    "name above": (add("../x"), "damaged ('../x' is not the name of a file)"),
    "name above in a folder": (add("a/../../x"), "damaged ('a/../../x' is not the name of a file)"),
    "absolute name": (lambda file: add(f"{file.parent}/x")(file), "/x' is not the name of a file)"),
    "name with a backslash": (add("..\\x"), "x' is not the name of a file)"),
    "folder": (add("a/"), "damaged ('a/' is not the name of a file)"),
    "repeated name": (repeat, f"damaged ({WEIGHTS} is the name of two files)"),
    "name of a folder": (add("econmt_runtime"), "damaged (econmt_runtime is the name of two files)"),
    "folder below a file": (add("model.json/a/b"), "damaged (model.json/a/b is the name of two files)"),
    "large size": (patch("model.json", 24, (1 << 31).to_bytes(4, "little")), "bytes, more than the limit of"),
    "encrypted": (patch(WEIGHTS, 8, b"\1"), "is encrypted"),
    "unknown method": (patch(WEIGHTS, 10, b"\x63"), "is compressed by another method than deflate"),
    "lzma": (patch(WEIGHTS, 10, b"\x0e"), "is compressed by another method than deflate"),
    "offset": (patch(WEIGHTS, 42, b"\xff\xff\xff\x7f"), "damaged ("),
    "offset of the directory": (shift, "damaged ("),
}
RUN = {"flipped weights", "changed configuration", "name above", "large size"}
RUN |= {"changed module", "missing module", "flipped module"}
"""Faults that are tried with ``python FILE``, too; with others Python may find no program in the file."""


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_told_and_leaves_nothing(whole: Path, tmp_path: Path, temporary: Path, fault: str) -> None:
    file, (apply, message) = tmp_path / "broken.pyz", FAULTS[fault]
    shutil.copyfile(whole, file)
    apply(file)
    with pytest.raises(RuntimeInputError) as error:
        econmt_runtime.load(file)
    assert str(error.value).startswith(str(file))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    if fault in RUN:
        line = refusal(run(file))
        assert line.startswith(f"econmt_runtime: error: {file}")
        assert message in line
        if fault.endswith("module"):
            assert f"{file}/{MODULE}: absent or changed since it was exported" in line
    assert sorted(tmp_path.iterdir()) == [file, temporary]


def test_members_are_few_and_not_large(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = members_of(whole)
    size = sum(map(len, members.values()))
    for limit, value in (("LARGEST", size), ("MOST_FILES", len(members))):
        with monkeypatch.context() as patch:
            patch.setattr(archive, limit, value)
            econmt_runtime.load(whole)
            patch.setattr(archive, limit, value - 1)
            with pytest.raises(RuntimeInputError, match=f"{len(members)} files of {size:,} bytes"):
                econmt_runtime.load(whole)


def test_no_more_is_written_than_is_declared(whole: Path, tmp_path: Path, temporary: Path) -> None:
    file = tmp_path / "bomb.pyz"
    write_members(file, {**members_of(whole), "zeros": b"\0" * (1 << 24)})
    patch("zeros", 24, (1000).to_bytes(4, "little"))(file)
    largest = []

    def follow(frame: Any, event: str, argument: Any) -> None:
        largest.extend(path.stat().st_size for path in temporary.rglob("zeros"))

    sys.setprofile(follow)
    try:
        with pytest.raises(RuntimeInputError, match="Bad CRC-32 for file 'zeros'"):
            econmt_runtime.load(file)
    finally:
        sys.setprofile(None)
    assert max(largest) <= 1000


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_neither_folder_nor_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "runtime.pyz"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(RuntimeInputError, match=f"{path}/model.json: cannot be read"):
        econmt_runtime.load(path)


@pytest.mark.parametrize("end", ["Ctrl-C", "kill", "broken pipe"])
def test_the_temporary_folder_is_gone_before_it_translates(whole: Path, temporary: Path, end: str) -> None:
    expected = run(whole, text=b"a b\n").stdout
    environment = {name: value for name, value in econmt_environment().items() if name != "PYTHONPATH"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(whole)], env=environment, **pipes) as process:
        for _ in range(2):
            process.stdin.write(b"a b\n")
            process.stdin.flush()
            assert process.stdout.readline() == expected
            assert list(temporary.iterdir()) == []
        if end == "broken pipe":
            process.stdout.close()
            process.stdin.write(b"a b\n")
            process.stdin.close()
        else:
            process.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGTERM)
        assert process.wait(PATIENCE) == {"Ctrl-C": 130, "kill": -signal.SIGTERM, "broken pipe": 0}[end]
        assert process.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_written_is_told_in_a_line(whole: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        streams = {"input": TEXT, "stdout": full, "stderr": subprocess.PIPE}
        done = subprocess.run([sys.executable, whole], env=econmt_environment(), **streams)
    assert (done.returncode, done.stderr) == (2, b"econmt_runtime: error: No space left on device\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_unpacking_that_is_interrupted_leaves_nothing(
    whole: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    made: list[Path] = []

    def failing(*_: object) -> None:
        made.extend(temporary.iterdir())
        raise error

    monkeypatch.setattr(shutil, "copyfileobj", failing)
    with pytest.raises((KeyboardInterrupt, RuntimeInputError)) as caught:
        econmt_runtime.load(whole)
    if isinstance(error, OSError):
        assert f"cannot be unpacked to {temporary} (No space left on device); free some" in str(caught.value)
    assert len(made) == 1


def test_no_place_for_temporary_folders_is_told(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(RuntimeInputError, match=r"whole.pyz: cannot be unpacked .* set TMPDIR"):
        econmt_runtime.load(whole)
