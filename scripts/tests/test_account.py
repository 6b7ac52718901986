"""The overhead of an account is measured for any model."""

from __future__ import annotations

from scripts.tests.conftest import Measured


def test_a_row_of_a_model(measured: Measured) -> None:
    words = ("--size", 1, "--rounds", 1, "--models", "LSTM classifier")
    (row,) = measured("account", "--overhead", *words)
    assert row["operators"] > 200  # of forward and backward pass and of the update
    assert min(float(row[name]) for name in ("step, ms", "tracked, ms")) > 0
    assert "empty mode" in row
