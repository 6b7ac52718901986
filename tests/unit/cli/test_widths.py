"""Every screen fits 80 columns: help, tables and talk, on a terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import re
import sys
from pathlib import Path

import pytest

from econmt.cli.main import COMMANDS
from econmt.data.files import notice
from tests.unit.cli.conftest import Call, Ended
from tests.unit.training.tiny import write_recipe

HELP = [
    *([name] for name in COMMANDS),
    *(["bench", name] for name in ("select", "training")),
    *(["recipes", name] for name in ("list", "copy", "show", "validate")),
]
SMALL = ("data.max_length=9", "training.batch.size=8")


def too_long(text: str) -> list[str]:
    """Lines of more than 80 cells; colours take none."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line for line in re.split("[\r\n]", plain) if len(line) > 80]


def check(ended: Ended) -> None:
    """A command has succeeded, and bars and tables fit; of its talk each message is a line, which a terminal breaks."""
    assert ended.code == 0, ended.err
    assert not too_long(ended.out)
    assert not too_long(re.sub("econmt: .*", "", ended.err))


@pytest.fixture(params=["pipe", "terminal"])
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tables and bars take for a terminal of 80 columns, or a pipe."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if request.param == "terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")


@pytest.mark.parametrize("words", [[], *HELP], ids=" ".join)
def test_help(call: Call, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = call(*words, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert not too_long(ended.out)
    assert "..." not in ended.out.partition("Commands:")[2], "summaries of commands are too long"
    if words not in ([], ["recipes"]):
        assert any(line.strip().startswith(f"econmt {words[0]} ") for line in ended.lines), "no example"


@pytest.mark.slow
@pytest.mark.parametrize("screen", ["terminal"], indirect=True)
@pytest.mark.usefixtures("screen")
def test_tables_of_measurements(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)  # into a pipe benches write CSV
    recipe = write_recipe(tmp_path / "reverse.yaml", tmp_path / "nowhere", tmp_path / "run")
    profiled = ("profile", recipe, *SMALL)
    for words in (
        (*profiled, "--compare"),
        (*profiled, "--estimate", "--device", "cuda"),
        (*profiled, "--fit", "1MiB", "--bucket", "4x4", "--compare"),
        ("bench select", recipe, *SMALL, "--seconds", 0.01),
        ("bench training --length 3 --seconds 0.01 --precision float32", recipe),
        ("recipes list",),
    ):
        check(call(*words))


@pytest.mark.usefixtures("screen")
def test_tables_of_models(
    call: Call, text: Path, word_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").symlink_to(text)
    (tmp_path / "model").symlink_to(word_model)
    recipe = write_recipe(Path("reverse.yaml"), Path("text"), Path("run"))
    source, target = "text/test.src", "text/test.trg"
    for words in (
        ("prepare", recipe, "data.prepared=store"),
        ("train", recipe, "data.prepared=store", "--dry-run"),
        ("info", "model"),
        ("translate", "-m", "model", "-i", source, "-o", "translated"),
        ("score", "-m", "model", "-s", source, "-t", target, "-o", "scores"),
        ("average", "-m", "model", "-n", 2, "-o", "averaged"),
        ("export", "model", "exported"),
    ):
        ended = call(*words)
        check(ended)
        assert words[-1] not in ("averaged", "exported") or ended.lines[-1] == words[-1]


def test_talk_is_broken_on_a_terminal_and_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "a warning that goes on and on " * 5
    notice(line)
    assert capsys.readouterr().err == f"econmt: {line}\n"
    reading, writing = pty.openpty()
    with os.fdopen(writing, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        notice(line + "/a/" + 100 * "b")
        shown = b""
        while b"b\r\n" not in shown:  # a terminal hands over what it has by now, which may be a part
            shown += os.read(reading, 10_000)
    os.close(reading)
    *broken, name = shown.decode().split("\r\n")[:-1]
    assert len(broken) > 1
    assert max(map(len, broken)) <= 80
    assert name.strip() == "/a/" + 100 * "b"
