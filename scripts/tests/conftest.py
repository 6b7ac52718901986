"""Calls of the benchmarks within this process, and what the tests of the packages share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from econmt.cli.main import main
from econmt.engine import threads
from scripts.bench.__main__ import PROGRAM, application
from tests.unit.cli.conftest import Call, calling

pytest_plugins = ["tests.conftest", "tests.pictures"]


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands see an idle machine: on a busy one they warn on standard error, a line that no test here expects."""
    monkeypatch.setattr(threads, "_load", lambda: 0.0)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Runs ``python -m scripts.bench`` with arguments."""
    return calling(partial(main, application=application, program=PROGRAM), capsys, monkeypatch, tmp_path)
