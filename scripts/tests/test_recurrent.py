"""Layers that `python -m scripts.bench recurrent` compares compute the same."""

from __future__ import annotations

import pytest
import torch

from scripts.bench import recurrent
from scripts.tests.conftest import Measured


def test_shapes_of_deepbench_and_rows(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [case.kind for case in recurrent.SETS["deepbench"]]
    assert (kinds.count("LSTM"), kinds.count("GRU")) == (22, 19)
    assert len(set(recurrent.SETS["deepbench"])) == 41
    side = recurrent.Side(torch.nn, recurrent.Case("LSTM", 6, 2, 3, 2), "tf32", torch.device("cpu"))
    blocks = side.module.weight_hh_l0.view(4, 2, 3, 2, 3)
    assert not blocks[:, 0, :, 1].any()
    assert blocks[:, 1, :, 1].all()
    cases = (recurrent.Case("GRU", 4, 3, 5), recurrent.Case("LSTM", 6, 2, 4, 3, 2))
    monkeypatch.setitem(recurrent.SETS, "layers", cases)
    monkeypatch.setattr(recurrent, "CHECKED", 3)
    rows = measured("recurrent", "layers", "--precision", "bfloat16", "tf32", "--turns", "1")
    layers = "GRU 4 x 3 x 5", "LSTM 6 x 2 x 4"
    assert [(row["layer"], row["precision"]) for row in rows] == [
        (layer, precision) for layer in layers for precision in ("bfloat16", "tf32")
    ]
    for row in rows:
        most = 3e-2 if row["precision"] == "bfloat16" else 1e-6
        assert all(float(row[f"{name}, error"]) < most for name in ("econmt_ops", "torch.nn"))
        assert row["x"] == pytest.approx(row["torch.nn, ms"] / row["econmt_ops, ms"])
