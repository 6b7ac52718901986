"""The training step is the loop that one would write by hand, and asks other ranks at the right moments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from econmt.config.training import Training
from econmt.data.batching.batches import Batch
from econmt.engine import step as module
from econmt.engine.communicator import Communicator, Reduction
from econmt.engine.measurement import measure_step
from econmt.engine.precision import NAMED, Precision
from econmt.engine.step import OtherRankError, StepResult, TrainingStep, updates_in_backward
from econmt.model import Implementations
from econmt.model.layers import draw_seed
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_ops.products.dropout import RowsSeed
from tests.unit.engine.toy import assert_same_bits, gradients, parameters, tiny_recipe
from tests.unit.training.tiny import watch_losses

VOCABULARY = 80
CLIPPED = "training.gradient_clipping={type: norm, threshold: 0.01}"


def make_task(*overrides: str) -> TranslationTask:
    defaults = ("training.optimizer.learning_rate=0.05", "model.dropout=0.2", "training.label_smoothing=0.1")
    return TranslationTask(tiny_recipe(*defaults, *overrides), VOCABULARY, VOCABULARY)


def make_step(task: TranslationTask, precision: Precision | None = None) -> TrainingStep:
    torch.manual_seed(5)
    return TrainingStep(task, task.build_model().train(), precision)


def some_batches(task: TranslationTask) -> list[Batch]:
    torch.manual_seed(6)
    return [task.example(shape) for shape in (Shape(3, 4, 5), Shape(2, 2, 3), Shape(1, 1, 1))]


def test_gradients_that_are_kept_stay_where_they_are_and_are_the_same() -> None:
    task = make_task(CLIPPED)
    found = []
    for keeps in (False, True):
        step = make_step(task)
        step.keeps_gradients = keeps
        batches = some_batches(task)
        torch.manual_seed(7)
        for _ in range(3):
            step(batches)
        found.append(parameters(step.model))
        before = [part.grad for part in step.model.parameters()]
        step(batches)
        same = [part.grad is gradient for part, gradient in zip(step.model.parameters(), before, strict=True)]
        assert not keeps or (all(same) and None not in before)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("start", "kept"), [("never", set()), ("at-once", {"average"})])
def test_a_prepared_step_has_its_gradients_and_state(start: str, kept: set[str]) -> None:
    step = make_step(make_task(f"training.averaging.start={start}"))
    step.prepare(gradients=True)
    for parameter in step.model.parameters():
        assert not parameter.grad.any()
        assert set(step.optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq", *kept}
    gradient = next(step.model.parameters()).grad
    step.prepare(gradients=True)
    assert next(step.model.parameters()).grad is gradient


def test_each_batch_may_have_its_own_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task()
    used: list[Implementations] = []
    watch_losses(monkeypatch, lambda _, how: used.append(how))
    step = make_step(task)
    batches = some_batches(task)[:2]
    some = [Implementations()._replace(output=name) for name in ("reference", "recompute")]
    step.gradient(batches, step.tokens(batches), some)
    step.gradient(batches, step.tokens(batches))
    assert used == [*some, step.implementations, step.implementations]
    assert step.implementations == Implementations.of(task.recipe.ops)


def test_a_watcher_is_told_of_every_phase() -> None:
    step = make_step(make_task())
    batches = some_batches(make_task())[:2]
    seen: list[tuple[str, bool]] = []

    def watch(phase: str, value: Tensor | None) -> None:
        seen.append((phase, value is not None and value.requires_grad))

    step.run(batches, step.tokens(batches), on_phase=watch)
    assert seen == [*2 * [("forward", False), ("backward", True)], ("optimizer", False)]


def test_where_updates_are_made_in_the_backward_pass() -> None:
    always = {"optimizer_in_backward": "always"}
    for changes, precision, processes, wanted in (
        ({}, "bfloat16", 1, ["cuda"]),
        ({"update_interval": 2}, "float32", 1, []),
        ({**always, "update_interval": 2}, "float32", 1, ["cpu", "cuda"]),
        (always, "float32", 2, []),
        (always, "float16", 1, []),
        ({**always, "gradient_clipping": {"type": "norm"}}, "float32", 1, []),
    ):
        training = Training.model_validate({"gradient_clipping": {"type": "none"}, **changes})
        where = partial(updates_in_backward, training, NAMED[precision], processes)
        assert [name for name in ("cpu", "cuda") if where(torch.device(name))] == wanted


@pytest.mark.parametrize("implementation", ["reference", "recompute"])
def test_what_is_measured_is_what_is_trained(monkeypatch: pytest.MonkeyPatch, implementation: str) -> None:
    """The ledger's step leaves the bits that a trainer's leaves: gradients, clipping and rows of few words included."""
    task = make_task(CLIPPED, *(f"ops.{op}=reference" for op in ("encoder", "decoder", "output")))
    (batch,) = some_batches(task)[-1:]
    step = make_step(task)
    torch.manual_seed(7)
    wanted = step([batch])
    trained, left = parameters(step.model), gradients(step.model)
    measured = make_step(task)
    found: list[tuple[StepResult, dict[str, Tensor], dict[str, Tensor]]] = []
    update, finish = TrainingStep.update, TrainingStep.finish

    def noted(step: TrainingStep) -> None:
        update(step)
        found[-1] = (found[-1][0], gradients(step.model), parameters(step.model))

    def seen(step: TrainingStep, loss: Tensor) -> StepResult:
        found.append((finish(step, loss), {}, {}))
        return found[-1][0]

    monkeypatch.setattr(TrainingStep, "finish", seen)
    monkeypatch.setattr(TrainingStep, "update", noted)
    torch.manual_seed(7)
    measure_step(measured, batch, timed=False)
    (result, gradient, after), *_ = found
    assert torch.equal(result.loss, wanted.loss)
    assert torch.equal(result.norm, wanted.norm)
    assert_same_bits(gradient, left)
    assert_same_bits(after, trained)


@pytest.mark.parametrize("tied", ["none", "src_trg_softmax"])
def test_updates_in_the_backward_pass_are_those_after_it(tied: str) -> None:
    """Gradients of rows, and of a table with three uses, which is updated once."""
    keys = "training.gradient_clipping={type: value, threshold: 0.0001}", f"model.weight_tying={tied}"
    runs = []
    for when in ("always", "never"):
        step = make_step(make_task(*keys, f"training.optimizer_in_backward={when}"))
        assert (step.backward_updates is not None) == (when == "always")
        batches = some_batches(step.task)
        torch.manual_seed(7)
        results = [step([batch]) for batch in batches] + [step(batches)]
        applied = step.gradient([batches[0]], step.tokens(batches[:1]), applies=True)
        assert (step.parameters[0].grad is None) == (when == "always")
        step.update()
        before = parameters(step.model)
        again = step.gradient(batches, step.tokens(batches))
        step.update()  # the one before does not stand for it
        assert any(not torch.equal(before[name], part) for name, part in parameters(step.model).items())
        results += [applied, again]
        runs.append(([(float(one.loss), float(one.norm)) for one in results], step.model))
    assert runs[0][0] == runs[1][0]
    assert_same_bits(*(parameters(model) for _, model in runs))


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


def make_recorded_step(rank: RecordedRank) -> tuple[TrainingStep, list[object]]:
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
    step, batches = make_recorded_step(rank)
    step.overlaps = overlaps
    step(batches)  # type: ignore[arg-type]
    assert rank.calls == ["abandon", *calls, "finish", "spread"]


def test_batches_losses_and_shares_of_other_ranks() -> None:
    rank = RecordedRank(failed=2)
    step, batches = make_recorded_step(rank)
    assert (step.agree(3), rank.calls) == (3, []), "where gradients are sent early no rank is asked"
    step.overlaps = False
    with pytest.raises(OtherRankError) as caught:
        step(batches)  # type: ignore[arg-type]
    assert caught.value.number == 1
    assert "finish" not in rank.calls
    assert step.agree(0) == 1, "the later of the two"
    assert step.agree(5) == 5
    assert rank.calls[-2:] == ["most of 1", "most of 6"]
    rank = RecordedRank()
    step, batches = make_recorded_step(rank)
    parts = [float(step.accumulate(batch, torch.tensor(1), step.implementations)) for batch in batches]  # type: ignore[arg-type]
    result = step.gradient(batches, torch.tensor(1))  # type: ignore[arg-type]
    assert float(result.loss) == pytest.approx(2 * sum(parts), rel=0.2)
    first, *others = step.model.parameters()
    assert step.optimizer.owns(first)
    assert not any(step.optimizer.owns(parameter) for parameter in others)


def test_every_rank_draws_the_dropout_masks_of_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 of 4, in the second of two pipelines, begins after as many rows as it has itself."""
    monkeypatch.setattr(RecordedRank, "rank", 3)
    monkeypatch.setattr(RecordedRank, "stages", 2)
    step, batches = make_recorded_step(RecordedRank())
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
    step, batches = make_recorded_step(rank)
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
    step, _ = make_recorded_step(RecordedRank())
    step.model.register_buffer("state", torch.ones(2, 3))
    for wrong in ({"state": torch.zeros(4, 3)}, {}, {"state": torch.zeros(2, 3), "other": torch.zeros(1)}):
        assert not step.set_carried(wrong)
        assert torch.equal(step.carried()["state"], torch.ones(2, 3))
    assert step.set_carried({"state": torch.full((2, 3), 5.0)})
    assert torch.equal(step.carried()["state"], torch.full((2, 3), 5.0))
