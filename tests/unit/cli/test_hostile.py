"""Inputs that nobody should write: one clear line each, exit code 2, and nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from econmt.config.json_reader import json_text
from econmt.data import progress_bars
from econmt.errors import EconmtError
from econmt.options.shared_options import RecipeChoice
from tests.conftest import PATIENCE, ROOT, econmt_environment
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused


def test_names_in_utf_8_are_not_blamed_for_the_locale(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    monkeypatch.setattr(os, "fsencode", lambda word: word.encode("ascii", "surrogateescape"))
    name = "b\xe4r".encode().decode("ascii", "surrogateescape")
    problem = "argument 3 'b\xe4r' is in UTF-8, but the locale's encoding is ascii; set PYTHONUTF8=1"
    refused(call("translate", "-m", name), problem)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model", "[1]", "not a JSON object"),
        ("model", "{", "not valid JSON"),
        ("update", "²", "update"),
        ("quantized", "x", "quantized"),
        ("averaged", "a b", "averaged"),
        ("format", "\x1b[2J", "\\x1b[2J"),
    ],
)
def test_bad_metadata(call: Call, copy: Path, key: str, value: str, words: str) -> None:
    path = copy / "params.best.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"][key] = value
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + content[8 + size :])
    refused(call("info", copy), str(path), words)
    refused(call("translate", "-m", copy, text="a\n"), str(path))


def test_copying_a_recipe_to_a_full_disk_blames_the_copy(call: Call) -> None:
    if Path("/dev/full").exists():
        ended = call("recipes", "copy", "multi30k", "/dev/full", "--force")
        refused(ended, "/dev/full: the disk is full")


def shell(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command, sys.executable, *map(str, arguments)],
        input="a b\n",
        capture_output=True,
        text=True,
        env=econmt_environment(),
        cwd=ROOT,
        check=False,
    )


@pytest.mark.slow
def test_standard_streams_may_be_closed(word_model: Path, tmp_path: Path) -> None:
    verb = '"$0" -m econmt translate -m "$1"'
    good = shell(f"{verb} 2>&-", word_model)
    assert good.returncode == 0
    assert len(good.stdout.splitlines()) == 1
    assert "lines" not in good.stdout
    closed = shell(f"{verb} >&-", word_model)
    assert closed.returncode == 2
    assert [line for line in closed.stderr.splitlines() if "error" in line] == [
        "econmt: error: standard output is closed, so the results cannot be printed; leave it open, or give --output "
        "FILE where there is one"
    ]
    assert shell(f'{verb} -o "$2" <&- >&- 2>&-', word_model, tmp_path / "out").returncode == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_on_standard_output_is_one_line() -> None:
    full = shell('"$0" -m econmt recipes list >/dev/full')
    assert full.returncode == 1
    assert full.stderr.startswith("econmt: error: standard output: No space left on device")
    assert len(full.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_on_standard_error_loses_no_translation(word_model: Path) -> None:
    full, free = (
        shell(f'"$0" -m econmt translate -m "$1" 2>{file}', word_model) for file in ("/dev/full", "/dev/null")
    )
    assert full.stdout == free.stdout
    assert len(full.stdout.splitlines()) == 1


def test_control_characters_are_never_printed_raw(call: Call, word_model: Path, tmp_path: Path) -> None:
    name = tmp_path / "a\x1b[2J\nb"
    refused(call("info", name), "a\\x1b[2J\\nb", "no such folder")
    refused(call("evaluate", "-r", name, "-i", name), "a\\x1b[2J\\nb")
    assert str(EconmtError("one\ntwo", "three\u202e")) == "one\\ntwo\nthree\\u202e"
    assert json_text({"a": "ä\x9b\ud800\x1b"}) == '{"a": "ä\\u009b\\ud800\\u001b"}'
    ended = call("export", word_model, tmp_path / "new\x1b[2J")
    assert (ended.code, ended.out) == (0, f"{tmp_path}/new\\x1b[2J\n")
    copy = shutil.copytree(word_model, tmp_path / "evil\x1b")
    assert "\x1b" not in call("info", copy).succeeded().out
    os.truncate(copy / "params.best.safetensors", 100)
    refused(call("translate", "-m", copy, text="a\n"), "evil\\x1b")


@pytest.mark.parametrize("name", ["a #b", "2024", "true", "[x]", "~", "a: b", "é"])
def test_the_name_of_an_output_is_no_yaml(name: str) -> None:
    assert RecipeChoice("quickstart").load({"output": name}).output == name


def test_a_pipe_of_others_in_a_folder_is_let_be(call: Call, copy: Path) -> None:
    os.mkfifo(copy / "mine")
    assert call("info", copy).code == 0


@pytest.mark.parametrize("name", ["recipe.yaml", "training_state/00008/SHA256SUMS", ".lock"])
def test_no_file_of_a_model_is_overwritten(call: Call, copy: Path, name: str) -> None:
    before = (copy / name).read_bytes() if (copy / name).exists() else None
    refused(call("translate", "-m", copy, "-o", copy / name, text="a\n"), "belongs to the model")
    assert before is None or (copy / name).read_bytes() == before


def test_in_a_pipe_it_is_said_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bars, "QUIET_SECONDS", 0.001)
    said, told, others = threading.Event(), list[str](), threading.active_count()

    def hear(text: str) -> None:
        told.append(text)
        if text == "fitting":
            said.set()

    monkeypatch.setattr(progress_bars, "notice", hear)
    with progress_bars.status_line() as say:
        say("fitting")
        assert said.wait(PATIENCE)
    assert set(told) <= {"working", "fitting"}
    assert threading.active_count() <= others
