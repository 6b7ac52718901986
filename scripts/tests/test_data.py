"""The script behind the figures for large stores runs and says what it measured."""

from __future__ import annotations

import json

import pytest

from tests.conftest import run_python


@pytest.mark.thorough
def test_small_run() -> None:
    run = run_python("-m", "scripts.bench", "data", "--pairs", "3000", "--batches", "0")
    assert "wrote 3,000 pairs" in run.stderr
    figures = json.loads(run.stdout)
    assert figures["pairs"] == 3000
    assert figures["batches_read"] == figures["batches_per_epoch"] - 1 == 23
    assert 0 < figures["memory_at_end"]["now"] <= figures["memory_at_end"]["peak"]
    assert figures["memory_at_end"]["now"] - figures["memory_after_import_torch"]["now"] < 150
    assert 0.7 < figures["real_share_of_padded"] < 1.0
