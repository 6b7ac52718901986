"""The example of docs/own-models.md runs, and its asserts hold."""

from __future__ import annotations

import re

import pytest
import torch

from tests.conftest import ROOT


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "own-models.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    torch.manual_seed(0)
    exec(compile(example, "docs/own-models.md", "exec"), {"__name__": "example"})
    before, after = re.findall(r"[\d,]{5,}", capsys.readouterr().out)
    # tanh(q + k), B T S A values of four bytes, is no longer kept; the projected queries and keys are.
    saved = int(before.replace(",", "")) - int(after.replace(",", ""))
    assert saved >= 4 * 8 * 64 * (50 * 60 - 50 - 60)
