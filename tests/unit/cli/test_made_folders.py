"""Folders that commands make appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.training.test_checkpoints import failing

COMMANDS = {
    "export": ("export", "{model}", "{made}"),
    "average": ("average", "-m", "{model}", "-n", "2", "-o", "{made}"),
    "quantize": ("quantize", "-m", "{model}", "-o", "{made}"),
}


def words(verb: str, model: Path, made: Path) -> Sequence[str]:
    return [word.format(model=model, made=made) for word in COMMANDS[verb]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.parametrize("number", [1, 3, 6])
def test_a_full_disk_leaves_nothing(
    call: Call, word_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, number: int
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    operations = (os, "fsync"), (shutil, "copyfile")
    with failing(number, OSError(28, "No space left on device"), monkeypatch, operations):
        ended = call(*words(verb, word_model, place / "made"))
    assert ended.code == 2
    assert ended.out.splitlines()[-1:] != [str(place / "made")]
    assert f"econmt: error: {place / 'made'}: the disk is full; free some space" in ended.err
    assert list(place.iterdir()) == []
    assert call(*words(verb, word_model, place / "made")).code == 0
    assert [path.name for path in place.iterdir()] == ["made"]
    assert call("translate", "-m", place / "made", text="a b\n").code == 0


@pytest.mark.parametrize("verb", COMMANDS)
def test_only_new_or_empty_folders_are_used(call: Call, word_model: Path, tmp_path: Path, verb: str) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "thesis.txt").write_text("years of work")
    refused(call(*words(verb, word_model, made)), f"{made}: exists already; use a new folder")
    assert [path.name for path in made.iterdir()] == ["thesis.txt"]
    (made / "thesis.txt").unlink()
    assert call(*words(verb, word_model, made)).code == 0


def test_what_a_killed_command_left_is_removed(call: Call, word_model: Path, tmp_path: Path) -> None:
    for number in (999999999, os.getppid()):
        (tmp_path / f".made.{number}.partial").mkdir()
    assert call("export", word_model, tmp_path / "made").code == 0
    assert {path.name for path in tmp_path.glob(".made.*")} == {f".made.{os.getppid()}.partial"}


@pytest.mark.parametrize("verb", COMMANDS)
def test_damaged_parameters_are_refused_by_every_command_that_reads_them(
    call: Call, copy: Path, tmp_path: Path, verb: str
) -> None:
    for path in copy.glob("params.*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 0x40
        path.write_bytes(content)
    for arguments in (words(verb, copy, tmp_path / "made"), ("translate", "-m", str(copy))):
        ended = call(*arguments, text="a b\n")
        assert (ended.code, ended.out) == (2, "")
        assert "safetensors: damaged (its checksum is wrong)" in ended.err
    assert not (tmp_path / "made").exists()
