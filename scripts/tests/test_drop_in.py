"""Benchmarks of the replacements of torch.nn's layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import econmt_ops
from scripts.bench import drop_in, resets
from scripts.tests.conftest import Measured


def test_all_ways_to_reset_compute_the_same() -> None:
    torch.manual_seed(0)
    ours, theirs = econmt_ops.LSTM(3, 4, batch_first=True), nn.LSTM(3, 4, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    begins, inputs = torch.rand(5, 7) < 0.3, torch.randn(5, 7, 3)
    made = {name: way(inputs, begins) for name, way in resets.ways_of(ours, theirs, begins).items()}
    assert not torch.allclose(made["none"], made["resets"])
    for name in ("resets, on CPU", "padded", "packed"):
        torch.testing.assert_close(made[name], made["resets"])
    torch.testing.assert_close(made["none"], made["torch, none"])


def test_the_tables_of_resets_and_of_modules(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--batch 4 --steps 6 --hidden 8 --rate 0.2 --device cpu --precision ieee --turns 2"
    rows = measured("resets", *sizes.split())
    assert [row["way"] for row in rows] == [
        *("resets", "resets, on CPU", "none", "padded", "packed", "torch, none")
    ]
    assert rows[0]["x resets"] == 1.0
    assert all(float(row["error"]) < 1e-6 for row in rows if "none" not in row["way"])
    cases = (drop_in.Case("LSTM", 2, 4, 3, 2, True), drop_in.Case("GRU", 3, 4, 5, ragged=True))
    monkeypatch.setattr(drop_in, "CASES", cases)
    first, second = measured("drop-in", "--turns", "2")
    assert next(iter(first.values())) == "LSTM 2 x 4 x 3 x 2 both ways"
    assert next(iter(second.values())) == "GRU 3 x 4 x 5 x 1 ragged"
    assert first["recompute, MB"] > 0
