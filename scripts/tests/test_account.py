"""The overhead of an account is measured for any model, and predictions for models by others."""

from __future__ import annotations

import importlib.util

import pytest

from scripts.tests.conftest import Measured
from tests.unit.cli.conftest import Call


def test_a_row_of_a_model(measured: Measured, bench: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--size", 1, "--rounds", 1, "--models", "LSTM classifier")
    (row,) = measured("account", "--overhead", *words)
    assert row["operators"] > 200  # of forward and backward pass and of the update
    assert min(float(row[name]) for name in ("step, ms", "tracked, ms")) > 0
    assert "empty mode" in row
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    said = bench("account-models", "--models", "vgg16", "gpt2").out
    assert "Not installed, and left out: timm, torch_geometric, torchvision, transformers" in said


@pytest.mark.slow
def test_a_prediction_for_a_model_of_torchvision(measured: Measured) -> None:
    pytest.importorskip("torchvision")
    (row,) = measured("account-models", "--models", "squeezenet1_1", "--batch", 1)
    assert abs(row["difference, %"]) < 0.1
