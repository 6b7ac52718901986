"""A training step asks the other ranks for the right thing at the right moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from econmt.engine import step as module
from econmt.engine.communicator import Communicator, Reduction
from econmt.engine.step import OtherRankError, TrainingStep
from econmt.model.layers import draw_seed
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_ops.products.dropout import RowsSeed
from tests.unit.engine.toy import tiny_recipe


class Recorded(SimpleNamespace):
    """A reduction, or shares in which this rank updates the ``owned`` parameters, that writes down what is asked of it."""

    calls: list[str]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.append(name)

    def finish(self, loss: Tensor) -> None:
        """Doubles the loss."""
        self.calls.append("finish")
        loss *= 2


class RecordedRank(Communicator):
    """Rank 1 of 2, whose partner says that batch ``failed`` - 1 did not fit, or 0."""

    rank, size = 1, 2

    def __init__(self, failed: int = 0) -> None:
        self.calls: list[str] = []
        self.failed = failed

    def reduction(self, parameters: Iterable[nn.Parameter]) -> Reduction:
        assert list(parameters)
        return Recorded(calls=self.calls)

    def shares(self, parameters: Iterable[nn.Parameter]) -> Recorded:
        return Recorded(calls=self.calls, owned=list(parameters)[:1])

    def all_reduce_max(self, *values: int) -> list[int]:
        self.calls.append(f"most of {values[0]}")
        return [max(values[0], self.failed)]


def make_step(rank: RecordedRank) -> tuple[TrainingStep, list[object]]:
    """A step of a tiny model, and two batches for it."""
    task = TranslationTask(tiny_recipe(), 11, 11)
    step = TrainingStep(task, task.build_model().train(), communicator=rank)
    accumulate = step.accumulate

    def recorded(*arguments: object) -> Tensor:
        rank.calls.append("batch")
        return accumulate(*arguments)  # type: ignore[arg-type]

    step.accumulate = recorded  # type: ignore[method-assign, assignment]
    return step, [task.example(Shape(2, 3, 4)), task.example(Shape(1, 2, 2))]


@pytest.mark.parametrize(
    ("overlaps", "calls"),
    [(True, ["batch", "begin", "batch"]), (False, ["batch", "batch", "pack", "most of 0"])],
)
def test_sending_begins_before_the_last_batch_only(overlaps: bool, calls: list[str]) -> None:
    """Without overlap nothing is sent before all have computed."""
    rank = RecordedRank()
    step, batches = make_step(rank)
    step.overlaps = overlaps
    step(batches)  # type: ignore[arg-type]
    assert rank.calls == ["abandon", *calls, "finish", "spread"]


def test_a_batch_that_another_rank_could_not_compute_is_named() -> None:
    rank = RecordedRank(failed=2)
    step, batches = make_step(rank)
    assert (step.agree(3), rank.calls) == (3, []), "where gradients are sent early no rank is asked"
    step.overlaps = False
    with pytest.raises(OtherRankError) as caught:
        step(batches)  # type: ignore[arg-type]
    assert caught.value.number == 1
    assert "finish" not in rank.calls
    assert step.agree(0) == 1, "the later of the two"
    assert step.agree(5) == 5
    assert rank.calls[-2:] == ["most of 1", "most of 6"]


def test_the_loss_is_that_of_all_ranks_and_an_optimizer_has_its_share() -> None:
    rank = RecordedRank()
    step, batches = make_step(rank)
    parts = [float(step.accumulate(batch, torch.tensor(1), step.implementations)) for batch in batches]  # type: ignore[arg-type]
    result = step.gradient(batches, torch.tensor(1))  # type: ignore[arg-type]
    assert float(result.loss) == pytest.approx(2 * sum(parts), rel=0.2)
    first, *others = step.model.parameters()
    assert step.optimizer.owns(first)
    assert not any(step.optimizer.owns(parameter) for parameter in others)


def test_every_rank_draws_the_dropout_masks_of_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2 begins after as many rows as it has itself."""
    step, batches = make_step(RecordedRank())
    rows = []

    def loss(*arguments: object) -> Tensor:
        seed = draw_seed()
        assert isinstance(seed, RowsSeed)
        rows.append(seed.first_row)
        return next(step.model.parameters()).sum()

    monkeypatch.setattr(TranslationTask, "loss", loss)
    step(batches)  # type: ignore[arg-type]
    assert rows == [2, 1]


@pytest.mark.parametrize("overlaps", [True, False])
def test_seconds_are_those_of_computing_alone(monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
    """Each batch takes 3 seconds, whatever concerns the other ranks 100; two updates add up."""
    now = [50.0]
    rank = RecordedRank()
    step, batches = make_step(rank)
    step.overlaps = overlaps

    def lasts(seconds: float, result: object) -> object:
        def call(*arguments: object) -> object:
            now[0] += seconds
            return result

        return call

    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(step, "accumulate", lasts(3.0, torch.zeros(())))
    monkeypatch.setattr(rank, "all_reduce_max", lasts(100.0, [0]))
    for name in ("pack", "finish"):
        monkeypatch.setattr(step._reduction, name, lasts(100.0, None))
    for _ in range(2):
        step.gradient(batches, torch.tensor(1), adds=True)  # type: ignore[arg-type]
    assert step.seconds == 12.0
    assert step.number is None
    assert module.time is time


def test_carried_states_of_other_shapes_change_nothing() -> None:
    step, _ = make_step(RecordedRank())
    step.model.register_buffer("state", torch.ones(2, 3))
    for wrong in ({"state": torch.zeros(4, 3)}, {}, {"state": torch.zeros(2, 3), "other": torch.zeros(1)}):
        assert not step.set_carried(wrong)
        assert torch.equal(step.carried()["state"], torch.ones(2, 3))
    assert step.set_carried({"state": torch.full((2, 3), 5.0)})
    assert torch.equal(step.carried()["state"], torch.full((2, 3), 5.0))
