"""Folders for caches: where they are, who may write them, and which ones other libraries get."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from econmt_ops.core import caches
from econmt_ops.core.caches import cache_folder, private_folder, use_private_compiler_folder
from tests.conftest import fails_with

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there, folders have no owners and no modes")
USER = os.geteuid()
OTHERS = ("TRITON_CACHE_DIR", "MPLCONFIGDIR", "HF_HOME")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files, and no variable that names a folder."""
    for variable in ("ECONMT_CACHE", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", *OTHERS):
        monkeypatch.setenv(variable, "")  # so that what the test sets does not stay
        monkeypatch.delenv(variable)
    monkeypatch.setattr(caches.sys, "platform", "linux")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "econmt"
    monkeypatch.setattr(caches.sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "econmt"
    monkeypatch.setattr(caches.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder() == tmp_path / "caches" / "econmt"
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "named"))
    assert cache_folder() == tmp_path / "named"
    assert not any(variable in os.environ for variable in OTHERS)
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]


@pytest.mark.parametrize("reason", ["there is no home folder", "/.cache/econmt cannot be created"])
def test_without_a_home_a_private_temporary_folder_serves(
    temporary: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason.startswith("there"):
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", fails_with(KeyError(USER)))
    else:
        monkeypatch.setenv("HOME", "/")
        monkeypatch.setenv("HF_HOME", "/chosen")
        monkeypatch.setattr(os, "access", lambda path, _: Path(path) != Path("/"))
    told = f"econmt_ops: {reason}, so caches are kept in {temporary}/econmt-{USER};"
    with pytest.warns(RuntimeWarning, match=told):
        folder = cache_folder()
    assert folder == temporary / f"econmt-{USER}"
    assert mode(folder) == 0o700
    folders = [str(folder / name) for name in ("triton", "matplotlib")]
    folders.append(str(folder / "huggingface") if reason.startswith("there") else "/chosen")
    assert [os.environ[variable] for variable in OTHERS] == folders
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache_folder() == folder  # also in processes that this one starts


def test_an_existing_folder_is_read_where_it_cannot_be_written(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache/econmt").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache_folder() == tmp_path / ".cache/econmt"


def test_a_folder_that_others_may_write_is_not_used(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "a" / "own"
    assert private_folder(own) == own
    assert mode(own) == 0o700
    own.chmod(0o755)
    assert private_folder(own) == own
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(own)
    file.write_text("")
    taken = [link, file, file / "below"]
    for bits in (0o777, 0o775, 0o757):
        taken.append(tmp_path / f"{bits:o}")
        taken[-1].mkdir()
        taken[-1].chmod(bits)
    for path in taken:
        other = private_folder(path)
        assert (other.parent, mode(other)) == (temporary, 0o700)
        assert other.name.startswith(path.name)
    monkeypatch.setattr(os, "geteuid", lambda: USER + 1)
    assert private_folder(own).parent == temporary


def test_the_compiler_gets_a_private_folder(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import codecache

    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, "")
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    for before in (None, str(temporary / "torchinductor_someone")):
        if before is not None:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        use_private_compiler_folder()
        folder = tmp_path / "cache" / f"inductor-{USER}"
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
        assert mode(folder) == 0o700
        assert str(folder / "headers") == codecache._HEADER_DIR
        assert str(folder / "headers/locks") == codecache._HEADER_LOCK_DIR
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
    use_private_compiler_folder()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "chosen")


@pytest.mark.slow
def test_nothing_of_the_compiler_is_in_the_folder_that_anybody_may_create(tmp_path: Path) -> None:
    code = (
        "import torch; from torch._inductor.runtime.runtime_utils import default_cache_dir; print(default_cache_dir())\n"
        "from econmt_ops.backends.compiled import compile_step\n"
        "print(compile_step(lambda x: x.sin() + 1)(torch.zeros(8)).tolist())"
    )
    unset = {"TORCHINDUCTOR_CACHE_DIR", *OTHERS}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"TMPDIR": str(tmp_path), "ECONMT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    default, result = done.stdout.splitlines()
    assert result == str([1.0] * 8)
    assert not Path(default).exists() or not any(Path(default).iterdir())
    assert any((tmp_path / "cache" / f"inductor-{USER}").rglob("*.so"))
