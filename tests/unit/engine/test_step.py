"""The training step is the loop that one would write by hand, and every room runs this one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt.data.batching.batches import Batch
from econmt.engine.measurement import measure_step
from econmt.engine.optimizers import make_optimizer
from econmt.engine.precision import Precision
from econmt.engine.step import StepResult, TrainingStep
from econmt.model import Implementations, layers
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from tests.unit.engine.toy import assert_same_bits, gradients, parameters, tiny_recipe
from tests.unit.training.tiny import watch_losses

VOCABULARY = 80
CLIPPED = "training.gradient_clipping={type: norm, threshold: 0.01}"
SHAPES = (Shape(3, 4, 5), Shape(2, 2, 3), Shape(1, 1, 1))


def make_task(*overrides: str) -> TranslationTask:
    defaults = ("training.optimizer.learning_rate=0.05", "model.dropout=0.2", "training.label_smoothing=0.1")
    return TranslationTask(tiny_recipe(*defaults, *overrides), VOCABULARY, VOCABULARY)


def make_step(task: TranslationTask, precision: Precision | None = None) -> TrainingStep:
    torch.manual_seed(5)
    return TrainingStep(task, task.build_model().train(), precision)


def some_batches(task: TranslationTask) -> list[Batch]:
    torch.manual_seed(6)
    return [task.example(shape) for shape in SHAPES]


def by_hand(
    task: TranslationTask, batches: list[Batch], updates: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and losses of a loop without the step, its gradients those of sparse rows where the step's are."""
    torch.manual_seed(5)
    model = task.build_model().train()
    layers.give_sparse_gradients(model)
    training = task.recipe.training
    optimizer = make_optimizer(dict(model.named_parameters()), training.optimizer)
    losses = []
    torch.manual_seed(7)
    for _ in range(updates):
        for parameter in model.parameters():
            parameter.grad = None
        total = torch.zeros(())
        for batch in batches:
            optimizer.make_dense()
            source, target = (batch.source, batch.source_lengths), (batch.target_input, batch.target_output)
            loss = model.loss(*source, *target, training.label_smoothing)
            total = total + loss.detach()
            torch.autograd.backward(loss / sum(batch.target_tokens for batch in batches))
        optimizer.clip(training.gradient_clipping.type, training.gradient_clipping.threshold)
        optimizer.step()
        losses.append(float(total))
    return parameters(model), losses


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (CLIPPED,),
        ("training.gradient_clipping={type: value, threshold: 0.0001}",),
        ("training.gradient_clipping={type: none}", "training.optimizer={name: sgd, momentum: 0.9}"),
        ("model.weight_tying=src_trg_softmax", CLIPPED),
    ],
    ids=["plain", "norm", "value", "momentum", "tied"],
)
@pytest.mark.parametrize("count", [1, 3], ids=["one batch", "three batches"])
def test_equals_the_loop_written_by_hand(overrides: tuple[str, ...], count: int) -> None:
    task = make_task(*overrides)
    batches = some_batches(task)[-count:]
    step = make_step(task)
    torch.manual_seed(7)
    losses = [float(step(batches).loss) for _ in range(3)]
    wanted, expected = by_hand(task, batches, 3)
    assert losses == expected
    assert_same_bits(parameters(step.model), wanted)


def test_the_rows_of_few_words_are_a_sparse_gradient() -> None:
    task = make_task()
    step = make_step(task)
    few, many = some_batches(task)[-1], task.example(Shape(9, 9, 9))
    for batch, sparse in ((few, True), (many, False)):
        step.gradient([batch], step.tokens([batch]))
        gradient = step.model.get_parameter("source_embedding.weight").grad
        assert gradient.is_sparse == sparse


def test_a_sum_over_batches_is_divided_by_the_tokens_of_all() -> None:
    """The gradient alone changes no parameter, and each call forgets the one before."""
    task = make_task("model.dropout=0.0")
    step = make_step(task)
    before, batches = parameters(step.model), some_batches(task)
    tokens = step.tokens(batches)
    assert (int(tokens), tokens.dtype) == (15 + 6 + 1, torch.int64)
    whole = step.gradient(batches, tokens)
    found = gradients(step.model)
    parts = [step.gradient([batch], tokens) for batch in batches]
    assert float(whole.loss) == pytest.approx(sum(float(part.loss) for part in parts))
    again = step.gradient(batches, tokens)
    assert torch.equal(again.norm, whole.norm)
    assert_same_bits(gradients(step.model), found)
    step.clear()
    losses = [step.accumulate(batch, tokens, step.implementations) for batch in batches]
    assert torch.equal(step.finish(torch.stack(losses).sum()).norm, whole.norm)
    assert_same_bits(gradients(step.model), found)
    assert_same_bits(parameters(step.model), before)
    step.update()
    assert any(not torch.equal(before[name], value) for name, value in parameters(step.model).items())


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


def test_an_error_says_which_batch_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(make_task())
    batches = some_batches(make_task())

    def full(batch: Batch, _: Implementations) -> None:
        if batch is batches[1]:
            raise MemoryError

    watch_losses(monkeypatch, full)
    with pytest.raises(MemoryError):
        step.run(batches, step.tokens(batches))
    assert step.number == 1


def test_a_watcher_is_told_of_every_phase() -> None:
    step = make_step(make_task())
    batches = some_batches(make_task())[:2]
    seen: list[tuple[str, bool]] = []

    def watch(phase: str, value: Tensor | None) -> None:
        seen.append((phase, value is not None and value.requires_grad))

    step.run(batches, step.tokens(batches), on_phase=watch)
    assert seen == [*2 * [("forward", False), ("backward", True)], ("optimizer", False)]


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
