"""The examples of docs/memory-account.md run from the first line to the last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/memory-account.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number} of memory-account.md", "exec"), names)
    assert len(blocks) == 5
    assert {path.name for path in tmp_path.iterdir()} == {
        *("page.html", "modules.csv", "before.json", "trace.json", "snapshot.pickle")
    }
    printed = capsys.readouterr().out
    assert "where the bytes of a training step went" in printed
    assert "Predicted for cuda; no step was run." in printed
    # The step runs again between the accounts, on the same shapes.
    assert names["comparison"].grown == 0


def test_the_readme_shows_what_its_example_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / "memory/README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(example, "the example of README.md", "exec"), {})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed[: len(shown.splitlines())] == shown.splitlines()
