"""What `econmt bench low-rank` times is the same function, and its rows say what they are of."""

from __future__ import annotations

import pytest
import torch

from econmt.errors import EconmtError
from econmt_ops import LowRankLSTMWeights
from scripts.bench import low_rank

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "has_compiler", lambda: False)


def test_ways_have_the_parameters_of_their_rank() -> None:
    found = low_rank.ways(10, [2, 3], torch.float32, CPU)
    assert [(way.name, way.rank, way.parameters) for way in found] == [
        ("full: torch.nn.LSTM", 0, 2 * 400 + 40),
        ("full: econmt_ops, recompute", 0, 2 * 400 + 40),
        ("rank 2, recompute", 2, 2 * 2 * 50 + 40),
        ("rank 3, recompute", 3, 2 * 3 * 50 + 40),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_way_is_held_to_the_definition(dtype: torch.dtype) -> None:
    inputs = torch.randn(2, 4, 6).to(dtype).requires_grad_()
    *_, way = low_rank.ways(6, [2], dtype, CPU)
    assert low_rank.check(way, inputs) < (1e-5 if dtype == torch.float32 else 0.05)
    assert isinstance(way.weights, LowRankLSTMWeights)

    class Wrong(low_rank.Way):
        def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().__call__(inputs) * 1.2

    with pytest.raises(EconmtError, match=r"rank 2, recompute differs from the definition by 0\.\d+"):
        low_rank.check(Wrong(*way), inputs)


def test_rows_hold_times_and_gains() -> None:
    said: list[str] = []
    rows = list(low_rank.rows((6, 3), [1, 2], [2], [torch.float32], CPU, said.append, seconds=0.05))
    assert [(row["batch"], row["layer"], row["rank"]) for row in rows] == [
        (batch, layer, rank)
        for batch in (1, 2)
        for layer, rank in (
            ("full: torch.nn.LSTM", 0),
            ("full: econmt_ops, recompute", 0),
            ("rank 2, recompute", 2),
        )
    ]
    for what in low_rank.PASSES:
        whole = min(float(row[f"{what}, ms"]) for row in rows[:2])
        assert float(rows[2][f"{what}, gain"]) == pytest.approx(whole / float(rows[2][f"{what}, ms"]))
        assert 0.0 < float(rows[2][f"{what}, ms"]) <= float(rows[2][f"{what}, median ms"])
    assert said[-2:] == [
        "low-rank 2 of 2: batch 2, float32, rank 2, recompute (3 of 3)",
        "low-rank 2 of 2: batch 2, float32, timing in turns",
    ]
