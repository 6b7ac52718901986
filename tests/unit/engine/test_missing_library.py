"""A missing C library is told once, with what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from econmt.api import commands
from econmt.engine import threads
from econmt.training.run import run_recipe
from tests.unit.training.tiny import Run, write_text


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.native, "is_built", lambda: False)
    commands._warn_of_library.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_commands_tell_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        commands.warn_of_slowness()
    lines = [line for line in capsys.readouterr().err.splitlines() if "C library" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "econmt: warning: econmt was installed without its C library: on a CPU it translates"
    )
    commands._warn_of_library.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_a_run_tells_it(tmp_path: Path) -> None:
    write_text(tmp_path, {"train": 12, "valid": 3})
    run = Run(tmp_path, tmp_path / "run", ("training.max_updates=1",))
    run_recipe(run.recipe, [tmp_path], console=run.console)
    assert run.said().count("warning: econmt was installed without its C library") == 1


def test_nothing_is_told_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert threads.missing_library() is None
    commands._warn_of_library.cache_clear()
    commands.warn_of_slowness()
    assert "C library" not in capsys.readouterr().err
