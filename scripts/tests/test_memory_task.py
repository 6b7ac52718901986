"""The memory task: its sequences, what counts as learnt, and a cell that learns it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.bench import memory_task as task

CPU = torch.device("cpu")
SMALL = task.Setting("gilr", 12, 16, 8, 3, 0.02)


def say(_: str) -> None:
    """Nobody listens."""


def test_sequences_are_what_the_task_says() -> None:
    trial = task.Trial(SMALL, CPU)
    seen = set()
    for _ in range(20):
        trial.fill()
        first, rest = trial._inputs[:, 0], trial._inputs[:, 1:]
        assert first[:, 0].tolist() == [1.0 if label else -1.0 for label in trial._labels.tolist()]
        assert not first[:, 1:].any()
        assert rest.sum(2).eq(1).all()
        assert rest.amax(2).eq(1).all()
        assert trial._labels.sum() == 4  # half of 8
        seen |= {tuple(trial._labels.tolist())}
    assert len(seen) > 10
    trial = task.Trial(SMALL._replace(batch=1), CPU)
    seen = set()
    for _ in range(20):
        trial.fill()
        seen.add(float(trial._labels))
    assert seen == {0.0, 1.0}


@pytest.mark.parametrize("cell", list(task.CELLS))
def test_gates_begin_by_keeping(cell: str) -> None:
    """Each unit for between 1 and T steps."""
    trial = task.Trial(SMALL._replace(cell=cell, steps=1000, hidden=400), CPU)
    bias = task.CELLS[cell].keeps(trial.layer, 400)
    assert bias.shape == (400,)
    assert 0 <= float(bias.min()) < 4
    assert 6.5 < float(bias.max()) <= 6.91
    takes = task.CELLS[cell].takes
    if takes is not None:
        assert takes(trial.layer, 400).equal(-bias)


def test_a_gated_linear_recurrence() -> None:
    torch.manual_seed(3)
    module = task.GILR(3, 4).double()
    inputs = torch.randn(2, 5, 3, dtype=torch.float64)
    outputs, last = module(inputs)
    h, rows = torch.zeros(2, 4, dtype=torch.float64), []
    for x in inputs.unbind(1):
        gate, impulse = module.both(x).chunk(2, -1)
        h = gate.sigmoid() * h + (1 - gate.sigmoid()) * impulse.tanh()
        rows.append(h)
    torch.testing.assert_close(outputs, torch.stack(rows, 1), rtol=1e-12, atol=1e-12)
    assert last.equal(outputs[:, -1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cell", list(task.CELLS))
def test_a_cell_learns_it(cell: str) -> None:
    row = task.run(SMALL._replace(cell=cell), CPU, say, limit=60.0, updates=3000)
    assert row["learnt"] == "yes"
    assert task.SURE / SMALL.batch <= row["updates"] <= 3000


def test_what_cannot_be_learnt_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlabelled(self: task.Trial) -> None:
        self._inputs.normal_(generator=self._draw)
        self._labels.copy_(torch.randint(2, self._labels.shape, generator=self._draw))

    monkeypatch.setattr(task.Trial, "fill", unlabelled)
    row = task.run(SMALL, CPU, say, limit=60.0, updates=215)
    assert (row["learnt"], row["updates"]) == ("no", 215)


def test_speed_up_is_that_over_an_lstm_of_the_same_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    took = {"lstm": 6.0, "gilr": 2.0}

    def run(setting: task.Setting, *_: object, **__: object) -> dict[str, str | int | float]:
        milliseconds = took[setting.cell]
        return {**setting._asdict(), "milliseconds": milliseconds}

    monkeypatch.setattr(task, "run", run)
    settings = [SMALL._replace(cell=cell, steps=steps) for steps in (8, 16) for cell in ("lstm", "gilr")]
    settings += [SMALL._replace(steps=8, hidden=99), SMALL._replace(steps=8, seed=2)]
    rows = list(task.rows(settings, CPU, say, limit=1.0, updates=1))
    assert [row.get("speed-up") for row in rows] == [None, 3.0, None, 3.0, None, None]


def test_memory_that_does_not_suffice_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(task.Trial, "fill", fails)
    (row,) = task.rows([SMALL], CPU, say, limit=1.0, updates=1)
    assert row["failure"] == "memory"
    assert task.lengths_of("1024") == [1024]
    assert task.lengths_of("8,5") == [8, 5]
    for wrong in ("", "0", "a", "1,", "-3"):
        with pytest.raises(ValueError):
            task.lengths_of(wrong)
