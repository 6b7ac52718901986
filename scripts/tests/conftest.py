"""Calls of the benchmarks within this process, and what the tests of the packages share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.__main__ import main
from tests.unit.cli.conftest import Call, calling

pytest_plugins = ["tests.conftest", "tests.pictures"]
Measured = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Runs ``python -m scripts.bench`` with arguments."""
    return calling(lambda words: sys.exit(main(words)), capsys, monkeypatch, tmp_path)


@pytest.fixture
def measured(bench: Call, tmp_path: Path) -> Measured:
    """Runs a benchmark that ends well, in a table of 80 columns; returns its rows."""

    def run(*arguments: object, code: int = 0) -> list[dict[str, Any]]:
        file = tmp_path / "rows.json"
        ended = bench(*arguments, "--json", file)
        assert ended.code == code, ended.err
        assert max(map(len, ended.lines)) <= 80
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
        return rows

    return run
