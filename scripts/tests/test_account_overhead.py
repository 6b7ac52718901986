"""The overhead of an account is measured for any model."""

from __future__ import annotations

import sys

import pytest

from scripts.bench import account_overhead


def test_a_table_of_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["account-overhead", "--size", "1", "--rounds", "1", "--models", "LSTM classifier"]
    monkeypatch.setattr(sys, "argv", arguments)
    account_overhead.main()
    first, title, *table = capsys.readouterr().out.splitlines()
    name, _, figures = first.partition(" classifier ")
    assert name == "LSTM"
    calls, alone, tracked = figures.split()[:3]
    assert int(calls) > 200  # operators of forward and backward pass and of the update
    assert min(float(alone), float(tracked)) > 0
    assert "overhead of a memory account" in title
    assert any("empty mode" in line for line in table)
