"""A captured step computes what a step computes that is launched kernel by kernel.

What is not marked ``cuda`` runs with graphs that only note operations (fake_cuda.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from econmt.data.batching.batches import Batch
from econmt.data.text.vocabulary import PAD
from econmt.engine import graphs
from econmt.engine.devices import is_out_of_memory
from econmt.engine.graphs import GraphedStep
from econmt.engine.optimizers import load_optimizer_tensors, optimizer_tensors
from econmt.engine.precision import Precision
from econmt.engine.step import OtherRankError, StepResult, TrainingStep
from econmt.errors import TrainingError
from econmt.model import Implementations
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_ops.dispatch import capture
from econmt_ops.dispatch.capture import first_error
from econmt_ops.optimizers.fused import FusedOptimizer
from tests.conftest import fails_with
from tests.unit.engine.fake_cuda import use_fake_cuda
from tests.unit.engine.toy import assert_same_bits, parameters, tiny_recipe
from tests.unit.training.conftest import make_run as make_run
from tests.unit.training.conftest import text as text
from tests.unit.training.tiny import MakeRun

VOCABULARY = 80
MODEL = (
    "model.embedding=16",
    "model.encoder={layers: 2, size: 32}",
    "model.decoder={layers: 2, size: 32}",
    "model.attention.size=16",
    "model.dropout=0.2",
    "training.label_smoothing=0.1",
    "training.optimizer.learning_rate=0.01",
)
CLIPPING = {
    "norm": "training.gradient_clipping={type: norm, threshold: 0.1}",
    "value": "training.gradient_clipping={type: value, threshold: 0.0001}",
    "none": "training.gradient_clipping={type: none}",
}
SHAPES = (Shape(8, 7, 9), Shape(8, 5, 6), Shape(4, 12, 3))
EXACT, ROUNDED = Precision(), Precision(torch.bfloat16)
TRITON, RECOMPUTE = (Implementations.everywhere(name) for name in ("triton", "recompute"))
RATES = (0.01, 0.01, 0.02, 0.005, 0.01, 0.0)
"""Of the updates; on the CPU, where a rate is a number that a graph keeps, tests stop before it changes."""


class Outcome(NamedTuple):
    """What is left of some updates."""

    losses: list[Tensor]
    norms: list[Tensor]
    parameters: dict[str, Tensor]


def make_step(
    *overrides: str, how: Implementations = TRITON, precision: Precision = EXACT, device: str = "cuda"
) -> TrainingStep:
    task = TranslationTask(tiny_recipe(*MODEL, *overrides), VOCABULARY, VOCABULARY)
    torch.manual_seed(5)
    return TrainingStep(task, task.build_model().train().to(device), precision, implementations=how)


def some_batches(task: TranslationTask, count: int = len(SHAPES)) -> list[Batch]:
    """Batches of all shapes in turn; every second row is one position shorter."""
    torch.manual_seed(6)
    found = []
    for number in range(count):
        batch = task.example(SHAPES[number % len(SHAPES)])
        shorter = torch.arange(len(batch.indices)) % 2
        source, target = batch.source_lengths - shorter, batch.target_lengths - shorter
        batch.source[shorter == 1, -1] = PAD
        for side in (batch.target_input, batch.target_output):
            side[shorter == 1, -1] = PAD
        tokens = {"source_tokens": int(source.sum()), "target_tokens": int(target.sum())}
        found.append(replace(batch, source_lengths=source, target_lengths=target, **tokens))
    return found


def train(
    step: TrainingStep, run: Callable[[Sequence[Batch]], StepResult], updates: Sequence[Sequence[Batch]]
) -> Outcome:
    """Updates at changing learning rates."""
    losses, norms = [], []
    for batches, rate in zip(updates, RATES, strict=False):
        step.optimizer.set_learning_rate(rate)
        result = run(batches)
        losses.append(result.loss.clone())
        norms.append(result.norm.clone())
    return Outcome(losses, norms, parameters(step.model))


def assert_same(found: Outcome, wanted: Outcome) -> None:
    assert list(map(float, found.losses)) == list(map(float, wanted.losses))
    assert list(map(float, found.norms)) == list(map(float, wanted.norms))
    assert_same_bits(found.parameters, wanted.parameters)


def assert_close(found: Outcome, wanted: Outcome) -> None:
    for one, other in zip((*found.losses, *found.norms), (*wanted.losses, *wanted.norms), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for name, value in wanted.parameters.items():
        # Adam moves a parameter by its whole rate however small the gradient is, of which the sign may be rounding.
        difference = (found.parameters[name] - value).abs()
        assert float(difference.mean()) < 1e-4, name


@pytest.mark.cuda
@pytest.mark.parametrize("clipping", ["norm", "value"])
def test_kernels_that_were_compiled_ahead_compute_the_same_bits(clipping: str) -> None:
    eager, step = (make_step(CLIPPING[clipping], precision=ROUNDED) for _ in range(2))
    graphed = GraphedStep(step, note=pytest.fail)
    updates = [[batch] for batch in some_batches(eager.task, 6)]  # type: ignore[arg-type]
    graphed.warm_up((batch, step.implementations) for (batch,) in updates[: len(SHAPES)])
    assert_same(train(step, graphed, updates), train(eager, eager, updates))
    assert torch.equal(step.random_state(), eager.random_state())


@pytest.mark.cuda
def test_going_back_to_earlier_parameters_repeats_what_came_after() -> None:
    step = make_step(CLIPPING["norm"])
    graphed = GraphedStep(step)
    updates = [[batch] for batch in some_batches(step.task)]  # type: ignore[arg-type]
    named = dict(step.model.named_parameters())
    train(step, graphed, updates)
    before, seeds = parameters(step.model), step.random_state()
    moments = {name: value.clone() for name, value in optimizer_tensors(step.optimizer, named).items()}
    wanted = train(step, graphed, updates)
    with torch.no_grad():
        for name, value in before.items():
            named[name].copy_(value)
    load_optimizer_tensors(step.optimizer, named, moments, "here")
    step.set_random_state(seeds)
    assert_same(train(step, graphed, updates), wanted)


def asks_for_a_value(task: TranslationTask, model: nn.Module, batch: Batch, *rest: object) -> Tensor:
    """A loss that waits for the device."""
    table = model.get_parameter("source_embedding.weight")
    values = table[batch.source].square().sum()
    return values * (2.0 if values.item() > 0 else 1.0)


@pytest.mark.cuda
def test_what_waits_for_the_gpu_says_so_once_and_trains_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, step = (make_step(CLIPPING["norm"]) for _ in range(2))
    notes: list[str] = []
    graphed = GraphedStep(step, note=notes.append)
    first, other, _ = some_batches(eager.task)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(TranslationTask, "loss", asks_for_a_value)
        updates = [[first], [first], [first]]
        assert_same(train(step, graphed, updates), train(eager, eager, updates))
    (note,) = notes
    assert note.startswith(
        "batches of 8 pairs, 7 source and 9 target positions run without a CUDA graph, which is slower: "
    )
    assert "capturing" in note
    # The next shape is captured as if nothing had been.
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_same(train(step, graphed, [[other]] * 3), train(eager, eager, [[other]] * 3))
    assert (len(notes), graphed.captured) == (1, 1)


GPU = (
    "training.device=cuda",
    "training.precision=float32",
    *(f"ops.{op}=triton" for op in ("encoder", "decoder", "attention", "output")),
)


@pytest.mark.cuda
@pytest.mark.parametrize("captures", [False, True], ids=["warm-up", "capture"])
def test_too_little_memory_for_a_graph_is_one_line(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    real = TranslationTask.loss

    def loss(task: TranslationTask, *rest: object) -> Tensor:
        full = torch.cuda.is_current_stream_capturing() == captures
        return full_memory() if full else real(task, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TranslationTask, "loss", loss)
    with pytest.raises(TrainingError, match="memory") as caught:
        make_run(*GPU).train()
    assert "\n" not in str(caught.value)
    assert float(torch.ones(3, device="cuda").sum()) == 3.0


@pytest.mark.cuda
def test_graphs_can_be_off(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphedStep, "_prepare", None)
    assert make_run(*GPU, "training.cuda_graphs=off").train().update == 8


@dataclass(frozen=True)
class BagTask(TranslationTask):
    """Predicts words from the mean of the source's; a row of no position would divide by zero."""

    def loss(
        self, model: nn.Module, batch: Batch, implementations: Implementations, label_smoothing: float = 0.0
    ) -> Tensor:
        source = model.get_parameter("source_embedding.weight")[batch.source]
        there = torch.arange(batch.source.shape[1]) < batch.source_lengths[:, None]
        state = (source * there[..., None]).sum(1) / batch.source_lengths[:, None]
        words = model.get_parameter("target_embedding.weight")[batch.target_output]
        scores = (words * state[:, None]).sum(2) - 0.1 * words.square().sum(2)
        return (scores.square() * (batch.target_output != PAD)).sum()


def bag_step(task: type[TranslationTask] = BagTask, *overrides: str) -> TrainingStep:
    made = task(tiny_recipe(*MODEL, CLIPPING["value"], *overrides), VOCABULARY, VOCABULARY)
    torch.manual_seed(5)
    return TrainingStep(made, made.build_model().train(), implementations=Implementations())


def bags(count: int = len(SHAPES)) -> list[Batch]:
    return some_batches(bag_step().task, count)  # type: ignore[arg-type]


def twin(
    task: type[TranslationTask] = BagTask, **settings: Any
) -> tuple[TrainingStep, TrainingStep, GraphedStep]:
    """A step, another one that is the same, and graphs of that."""
    eager, step = bag_step(task), bag_step(task)
    return eager, step, GraphedStep(step, **settings)


def count_warm_ups(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[GraphedStep, Any], object] = lambda *_: None
) -> list[int]:
    """Returns the source positions of the shapes that are run before their capture; ``before`` may fail."""
    runs, warm_up = list[int](), GraphedStep._warm_up

    def counted(graphed: GraphedStep, inputs: Any, *rest: Any) -> None:
        runs.append(inputs.batch.source.shape[1])
        before(graphed, inputs)
        warm_up(graphed, inputs, *rest)

    monkeypatch.setattr(GraphedStep, "_warm_up", counted)
    return runs


@pytest.fixture(autouse=True)
def _fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("cuda") is None:
        use_fake_cuda(monkeypatch)


def replays(graphed: GraphedStep) -> list[int]:
    """How often the graph of each shape was replayed."""
    graphs_of: dict[Any, Any] = graphed._graphs.graphs
    return [each.graph.replays for key, each in graphs_of.items() if isinstance(key, tuple)]


def operations(graphed: GraphedStep) -> list[Any]:
    """What each graph holds, even if it is released later."""
    graphs_of: dict[Any, Any] = graphed._graphs.graphs
    return [each.graph.operations for each in graphs_of.values()]


@pytest.mark.parametrize("several", [False, True])
def test_a_replay_reads_the_batch_that_it_is_given(several: bool) -> None:
    eager, step, graphed = twin(several=several)
    one, other = (bags(4)[n] for n in (0, 3))
    updates = [[one, other], [other, one]] if several else [[one], [other]]
    assert_same(train(step, graphed, updates), train(eager, eager, updates))
    assert replays(graphed) == [4 if several else 2]
    assert graphed.captured == 1 + several


def test_rows_that_are_missing_change_nothing() -> None:
    """Nor does the order of batches, where the most rows of a shape are known."""
    whole, *_ = bags()
    eager, step, graphed = twin(most_rows=lambda batch: {7: 8, 5: 2}[batch.source.shape[1]])
    updates = [[whole.first(3)], [whole]]
    assert_close(train(step, graphed, updates), train(eager, eager, updates))
    (captured,) = graphed._graphs.graphs.values()
    assert (captured.result[0].rows, replays(graphed)) == (8, [2])


def test_graphs_of_shapes_and_what_is_released() -> None:
    batches = bags()
    _, _, graphed = twin()
    for batch in (*batches, batches[1]):
        graphed([batch])
    assert graphed.captured == 3
    graphed([batches[0]], [Implementations(output="reference")])
    assert graphed.captured == 4
    small = GraphedStep(bag_step())
    for rows in (2, 8, 2, 4):
        small([batches[0].first(rows)])
    assert replays(small) == [2, 1, 1]
    held = operations(small)
    small.release()
    assert small.captured == 0
    assert not any(held), "they are gone, whoever still has them"
    step, never = bag_step(), bag_step()
    one, other = bags(2)
    graphed, always = GraphedStep(step, several=True), GraphedStep(never, several=True)
    updates = [[one, other], [other, one]]
    train(step, graphed, updates)
    assert all(parameter.grad is not None for parameter in step.parameters)
    graphed.release()
    assert all(parameter.grad is None for parameter in step.parameters)
    train(never, always, updates)
    assert_same(train(step, graphed, updates), train(never, always, updates))


def test_a_step_that_accumulates_from_now_on_has_graphs_of_several_batches() -> None:
    always, step, graphed = twin()
    one, other = (bags(4)[n] for n in (0, 3))
    graphed.capture(one)
    held = operations(graphed)
    graphed.accumulate()
    assert graphed.captured == 0
    assert not any(held)
    updates = [[one, other], [other], [other, one]]
    assert_same(train(step, graphed, updates), train(always, GraphedStep(always, several=True), updates))
    assert (replays(graphed), graphed.captured) == ([5], 2)


class AsksTask(BagTask):
    """Waits for the device in a batch of five source positions."""

    def loss(
        self, model: nn.Module, batch: Batch, implementations: Implementations, label_smoothing: float = 0.0
    ) -> Tensor:
        loss = super().loss(model, batch, implementations, label_smoothing)
        return loss * 2 if batch.source.shape[1] == 5 and loss.item() > 0 else loss


def full_memory(*_: object) -> Tensor:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory")


def full(owner: object, name: str, run: Callable[[], object]) -> None:
    """Runs something in which a function lacks memory, which is told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, full_memory)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            run()


@pytest.mark.parametrize("several", [False, True])
def test_the_reason_is_the_first_error_and_told_once_a_shape(several: bool) -> None:
    notes: list[str] = []
    eager, step, graphed = twin(AsksTask, several=several, note=notes.append)
    first, five, _ = bags()
    updates = [[first, five], [five, first]] if several else [[five], [five]]
    assert_close(train(step, graphed, updates), train(eager, eager, updates))
    assert notes == [
        "batches of 8 pairs, 5 source and 6 target positions run without a CUDA graph, which is slower: "
        "CUDA error: operation not permitted when stream is capturing"
    ]


def test_updates_and_captures_that_fail_leave_nothing() -> None:
    eager, step, graphed = twin(AsksTask, several=True)
    first, five, _ = bags()
    updates = [[first, five], [first, first]]
    assert_close(train(step, graphed, updates), train(eager, eager, updates))
    assert replays(graphed) == [2]
    eager, step, graphed = twin()
    batches = bags(2)
    assert_same(train(step, graphed, [batches, batches]), train(eager, eager, [batches, batches]))
    assert graphed.captured == 0
    eager, step, graphed = twin(several=True)
    updates = [bags(2)]
    full(TrainingStep, "finish_and_update", lambda: graphed(updates[0]))
    assert replays(graphed) == [0, 0]
    step.clear()  # as the trainer does
    assert_close(train(step, graphed, updates), train(eager, eager, updates))
    step = bag_step(BagTask, "training.optimizer_in_backward=always")
    batch, *_ = bags()
    full(FusedOptimizer, "clip_and_step_parts", lambda: GraphedStep(step).capture(batch))
    assert not step.is_partly_updated
    _, step, graphed = twin(several=True)
    batch, *_ = bags()
    before = [torch.ones_like(part) for part in step.model.parameters()]
    for part, gradient in zip(step.model.parameters(), before, strict=True):
        part.grad = gradient
    full(BagTask, "loss", lambda: graphed.capture(batch))
    assert all(part.grad is kept for part, kept in zip(step.model.parameters(), before, strict=True))


def test_a_warm_up_of_several_batches_takes_no_second_set_of_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, step, graphed = twin(several=True)
    batch, *_ = bags()
    kept = [parameter.grad for parameter in step.parameters]
    reached: list[bool] = []
    accumulate = TrainingStep.accumulate

    def watched(step: TrainingStep, *arguments: Any) -> Tensor:
        loss = accumulate(step, *arguments)
        reached.append(any(bool(parameter.grad.any()) for parameter in step.parameters))
        assert all(part.grad is gradient for part, gradient in zip(step.parameters, kept, strict=True))
        return loss

    monkeypatch.setattr(TrainingStep, "accumulate", watched)
    graphed.warm_up([(batch, step.implementations)])
    assert any(reached)
    assert not any(gradient.any() for gradient in kept if gradient is not None)


def test_after_an_error_streams_are_waited_for_and_workspaces_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    current = SimpleNamespace(wait_stream=lambda _: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(capture, "release_workspaces", lambda: calls.append("release"))
    capturer = capture.GraphCache(torch.device("cpu"))
    with pytest.raises(torch.cuda.OutOfMemoryError), capturer.warming_up():
        full_memory()
    assert calls == ["wait"]
    with pytest.raises(RuntimeError):
        capturer.capture(full_memory)
    assert calls == ["wait", "release", "release"]


class FullGraphs:
    """Graphs for whose last shape there is too little memory before its capture, or for the largest one in it."""

    def __init__(self, when: str) -> None:
        self.when, self.last = when, ""

    def warm_up(self, batches: Iterable[tuple[Batch, Implementations]]) -> list[Batch]:
        given = [batch for batch, _ in batches]
        assert len(given) == len({batch.positions for batch in given}) > 1
        self.last = given[-1].size_text
        return given[-1:] if self.when == "warm_up" else []

    def capture(self, *_: object) -> None:
        if self.when == "capture":
            full_memory()


@pytest.mark.parametrize("when", ["warm_up", "capture"])
def test_the_trainer_tells_too_little_memory_for_a_graph(make_run: MakeRun, when: str) -> None:
    trainer = make_run("training.trim_batches=never").trainer()
    graphs = FullGraphs(when)
    trainer._graphed = graphs  # type: ignore[assignment]
    with pytest.raises(TrainingError, match="memory") as caught:
        trainer.rehearse()
    assert (graphs.last in str(caught.value)) == (when == "warm_up")


class GraphsOfRows:
    """Graphs of batches of at most so many rows, which memory suffices for; gradients are full once at first."""

    def __init__(self, most: int) -> None:
        self.most, self.tried, self.accumulated = most, list[int](), 0

    def warm_up(self, batches: Iterable[tuple[Batch, Implementations]]) -> list[Batch]:
        return [batch for batch, _ in batches if len(batch.indices) > self.most]

    def accumulate(self) -> None:
        self.accumulated += 1
        if self.accumulated == 1:
            full_memory()

    def capture(self, batch: Batch, _: Implementations) -> None:
        self.tried.append(len(batch.indices))
        if self.tried[-1] > self.most:
            full_memory()


def test_a_largest_batch_that_does_not_fit_its_plan_is_divided_until_it_does(make_run: MakeRun) -> None:
    trainer = make_run("training.trim_batches=never", "training.memory_budget=600MB").trainer()
    trainer.budget.make(trainer.state, 0)
    plan = trainer.budget.plan
    trainer._graphed = FullGraphs("warm_up")  # type: ignore[assignment]
    trainer.rehearse()  # a shape that is too large waits for the plan to split it
    assert (plan.worst.rows, plan.divides) == (4, False)
    graphs = GraphsOfRows(most=1)
    trainer._graphed = graphs  # type: ignore[assignment]
    trainer.rehearse()
    assert (graphs.tried[0], graphs.tried[-1]) == (4, 1)
    assert graphs.accumulated == len(trainer.budget.notes) >= len(graphs.tried)
    assert (plan.worst.rows, plan.divides) == (1, True)
    begins = [note.split(" pairs of ")[0] for note in trainer.budget.notes[:2]]
    assert begins == [f"out of memory on cpu for {count}" for count in (4, 2)]
    trainer._graphed = GraphsOfRows(most=0)  # type: ignore[assignment]
    with pytest.raises(TrainingError, match="for a batch of 1 pairs"):
        trainer.rehearse()


def test_shapes_that_are_too_large_are_returned_and_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step, graphed = twin(note=pytest.fail)
    one, other, third = bags(3)

    def small(graphed: GraphedStep, inputs: Any) -> None:
        if inputs.batch.source.shape[1] == 5 and not graphed.captured:
            full_memory()

    runs = count_warm_ups(monkeypatch, small)
    given = [(each, step.implementations) for each in (one, one, other, third)]
    assert graphed.warm_up(given) == [other]
    assert runs == [7, 5, 12, 12], "a shape that comes twice is run once; the last one again, with launches"
    with monkeypatch.context() as patch:
        patch.setattr(step.communicator, "stages", 2)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            graphed.warm_up(given)
    assert runs.pop() == 5
    for each in (one, third, other):
        graphed.capture(each)
    assert runs[4:] == [5]


def test_shapes_that_were_warmed_up_are_captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, step, graphed = twin(note=pytest.fail)
    (one, other, third), runs = bags(3), count_warm_ups(monkeypatch)
    graphed.warm_up((each, step.implementations) for each in (one, other))
    assert (len(runs), graphed.captured) == (3, 0)
    updates = [[one], [other], [third]]
    assert_same(train(step, graphed, updates), train(eager, eager, updates))
    assert (len(runs), graphed.captured) == (4, 3)


@pytest.mark.parametrize("failed", [False, True])
def test_shapes_are_run_once_more_if_a_kernel_could_not_be_compiled(
    monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    _, step, graphed = twin(note=pytest.fail)
    (one, other), runs = bags(2), count_warm_ups(monkeypatch)
    monkeypatch.setattr(graphs.kernels, "runs_on", lambda _: True)
    module = SimpleNamespace(compiling_only=lambda _: nullcontext(SimpleNamespace(failed=failed)))
    monkeypatch.setattr(graphs, "importlib", SimpleNamespace(import_module=lambda _: module))
    graphed.warm_up((each, step.implementations) for each in (one, other))
    for each in (one, other):
        graphed.capture(each)
    assert len(runs) == (5 if failed else 3)


def test_too_little_memory_is_no_reason_to_go_on_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, graphed = twin(note=pytest.fail)
    batch, *_ = bags()
    calls: list[int] = []
    loss = BagTask.loss

    def second(task: BagTask, *rest: object) -> Tensor:
        calls.append(1)
        return full_memory() if len(calls) == 2 else loss(task, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(BagTask, "loss", second)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        graphed([batch])
    assert is_out_of_memory(first_error(torch.cuda.OutOfMemoryError()))


@pytest.mark.parametrize("several", [False, True])
def test_graphs_make_room_for_the_first_run_of_another_shape(
    monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    eager, step, graphed = twin(several=several, note=pytest.fail)
    one, other, third = bags(3)
    updates = [[one, other, third]] if several else [[one], [other], [one]]

    def beside_no_graph(graphed: GraphedStep, _: Any) -> None:
        if graphed._graphs.graphs:
            full_memory()
        done.append(1)

    done: list[int] = []
    count_warm_ups(monkeypatch, beside_no_graph)
    found, wanted = train(step, graphed, updates), train(eager, eager, updates)
    (assert_close if several else assert_same)(found, wanted)
    assert len(done) == (3 if several else 2)
    assert graphed.captured == (4 if several else 2)


def test_a_shape_makes_room_once_after_each_release(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, graphed = twin(note=pytest.fail)
    one, other = bags(2)
    prepare = GraphedStep._prepare

    def alone(graphed: GraphedStep, *rest: Any) -> Any:
        return full_memory() if graphed.captured else prepare(graphed, *rest)

    monkeypatch.setattr(GraphedStep, "_prepare", alone)
    for _ in range(2):
        graphed([one])
        graphed([other])
        graphed.release()
    for batch in (one, other, one):
        graphed([batch])
    with pytest.raises(torch.cuda.OutOfMemoryError):
        graphed([other])


def test_ranks_run_a_shape_alike_that_one_of_them_cannot_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, calls = list[str](), list[tuple[int, ...]]()
    eager, step, graphed = twin(several=True, note=notes.append)
    one, other = bags(2)

    def all_reduce_max(*refused: int) -> list[int]:
        calls.append(refused)
        return [1, *refused[1:]]

    monkeypatch.setattr(step.communicator, "size", 2)
    monkeypatch.setattr(step.communicator, "all_reduce_max", all_reduce_max)
    updates = [[one, other], [one, one]]
    assert_close(train(step, graphed, updates), train(eager, eager, updates))
    assert calls == [(0, 0, 0)], "only where shapes are new"
    assert replays(graphed) == [0, 0]
    assert notes == [
        f"batches of {one.size_text} run without a CUDA graph, which is slower: another rank cannot capture them"
    ]
    monkeypatch.setattr(step.communicator, "all_reduce_max", lambda *refused: [1])
    first = GraphedStep(step, note=notes.append)
    first.capture(other)
    assert len(notes) == 2


@pytest.mark.parametrize("fails", ["this rank", "another rank"])
def test_ranks_have_the_same_graphs_after_one_of_them_lacked_memory(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Otherwise only one of them would capture the smaller parts, and wait for the other one."""
    eager, step, graphed = twin(several=True, note=pytest.fail)
    one, other, third = bags(3)
    monkeypatch.setattr(step.communicator, "size", 2)
    graphed([one])
    assert graphed.captured == 2
    with monkeypatch.context() as patch:
        if fails == "this rank":
            real = BagTask.loss

            def small(task: BagTask, model: nn.Module, batch: Batch, *rest: Any) -> Tensor:
                return full_memory() if batch.source.shape[1] == 12 else real(task, model, batch, *rest)

            patch.setattr(BagTask, "loss", small)
        else:
            patch.setattr(step, "agree", fails_with(OtherRankError(1)))
        with pytest.raises(RuntimeError):
            graphed([other, third])
    assert graphed.captured == 2
    step.clear()  # as the trainer does
    updates = [[other, third]]
    found = train(step, graphed, updates)
    train(eager, eager, [[one]])
    assert_close(found, train(eager, eager, updates))
    assert graphed.captured == 4


def test_several_ranks_release_no_graph_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step, graphed = twin()
    one, other = bags(2)
    graphed([one])
    monkeypatch.setattr(step.communicator, "size", 2)
    full(BagTask, "loss", lambda: graphed.capture(other))
    assert graphed.captured == 1
