"""The ways that `python -m scripts.bench lstm` times compute one function, and its rows hold what the table prints."""

from __future__ import annotations

import pytest
import torch

from econmt.errors import InputError
from scripts.bench import lstm, lstm_schedules
from scripts.bench.frame import in_graph
from scripts.bench.layers import by_torch, peak_bytes
from tests.ops.helpers import assert_close

SHAPE = lstm.StackShape(layers=3, steps=4, hidden=5, batch=2)
STAGES = {name: stack for name, stack in lstm_schedules.stages().items() if "compiled" not in name}
FIRST, *OTHERS = STAGES
STREAMED = lstm_schedules.streamed_stages(fused=False)


def results(stack: lstm_schedules.Stack, dtype: torch.dtype) -> list[torch.Tensor]:
    inputs, layers = lstm.arguments(SHAPE, dtype, torch.device("cpu"))
    forward, both = lstm.passes_of(stack, inputs, layers)
    return [part.detach() for part in (forward(), *both())]


@pytest.mark.parametrize("name", OTHERS)
def test_all_ways_compute_the_same(name: str) -> None:
    assert_close(results(STAGES[name], torch.float64), results(STAGES[FIRST], torch.float64), 1e-12)


def test_ways_of_a_gpu_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its streams, and without the compiler."""
    monkeypatch.setattr(lstm_schedules, "fused_pointwise", lambda: lstm_schedules.pointwise)
    expected = results(STAGES[FIRST], torch.float64)
    for stack in lstm_schedules.streamed_stages(fused=True).values():
        assert_close(results(stack, torch.float64), expected, 1e-12)


@pytest.mark.cuda
@pytest.mark.parametrize("name", STREAMED)
def test_streams_compute_the_same_in_a_graph(name: str) -> None:
    device = torch.device("cuda")
    inputs, layers = lstm.arguments(SHAPE, torch.float32, device)
    expected = [part.detach() for part in lstm.passes_of(STAGES[FIRST], inputs, layers)[1]()]
    found: list[torch.Tensor] = []

    def both() -> None:
        found[:] = lstm.passes_of(STREAMED[name], inputs, layers)[1]()

    replay = in_graph(both, device)
    for part in found:
        part.detach().zero_()
    replay()
    assert_close([part.detach() for part in found], expected, 1e-5)


CPU, FLOAT32 = torch.device("cpu"), [torch.float32]


def test_rows_of_the_ablation() -> None:
    said: list[str] = []
    names = ["eight products a cell", "four gates in one product", "torch.nn.LSTM"]
    rows = list(lstm.rows(SHAPE, FLOAT32, {name: STAGES[name] for name in names}, CPU, said.append, 2))
    assert [row["schedule"] for row in rows] == names
    assert rows[0]["forward, gain"] == 1.0
    assert rows[0]["difference"] == 0.0
    assert all(row["difference"] < 1e-5 for row in rows)
    for row in rows:
        milliseconds = row["forward and backward, ms"]
        assert row["forward and backward, gain"] == pytest.approx(
            rows[0]["forward and backward, ms"] / milliseconds
        )
        operations = 3 * 2 * 3 * 4 * 2 * (4 * 5) * (2 * 5)
        assert row["forward and backward, GFLOP/s"] == pytest.approx(operations / milliseconds / 1e6)
    assert len(said) == 3


def test_some_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lstm, "stages", lambda on_gpu: STAGES)
    chosen = lstm.chosen_stages(["NN.lstm", "four"], False)
    assert list(chosen) == ["four gates in one product", "torch.nn.LSTM"]
    with pytest.raises(InputError, match="--schedule 'five': in no name of eight products a cell; four"):
        lstm.chosen_stages(["five"], False)
    kept = torch.ones(1000)

    def work() -> torch.Tensor:
        first = kept + kept
        first = first + kept
        return first[:10].clone()

    assert peak_bytes(work, torch.device("cpu")) == 2 * 4000
    # A library takes memory that no operator of PyTorch gives.
    inputs, layers = lstm.arguments(SHAPE, torch.float32, torch.device("cpu"))
    assert peak_bytes(lambda: by_torch(inputs, layers), torch.device("cpu")) > 1000
