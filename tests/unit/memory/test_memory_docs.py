"""The examples of the documentation of memory run from the first line to the last, and their asserts hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT


def blocks(file: str, kind: str = "python") -> list[str]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_example_of_own_models(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("docs/own-models.md")
    torch.manual_seed(0)
    exec(compile(example, "docs/own-models.md", "exec"), {"__name__": "example"})
    before, after = re.findall(r"[\d,]{5,}", capsys.readouterr().out)
    # tanh(q + k), B T S A values of four bytes, is no longer kept; the projected queries and keys are.
    saved = int(before.replace(",", "")) - int(after.replace(",", ""))
    assert saved >= 4 * 8 * 64 * (50 * 60 - 50 - 60)


def test_the_examples_of_the_memory_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks("docs/memory-account.md")):
        exec(compile(block, f"block {number} of memory-account.md", "exec"), names)
    assert number == 4
    files = {"page.html", "modules.csv", "before.json", "trace.json", "snapshot.pickle"}
    assert {path.name for path in tmp_path.iterdir()} == files
    printed = capsys.readouterr().out
    assert "where the bytes of a training step went" in printed
    assert "Predicted for cuda; no step was run." in printed
    # The step runs again between the accounts, on the same shapes.
    assert names["comparison"].grown == 0


def test_the_readme_shows_what_its_example_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    (example,), (shown,) = (blocks("memory/README.md", kind) for kind in ("python", "text"))
    exec(compile(example, "the example of README.md", "exec"), {})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed[: len(shown.splitlines())] == shown.splitlines()
