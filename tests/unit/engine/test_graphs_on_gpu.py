"""A step in CUDA graphs is the step: the same losses and parameters, bit for bit, new masks, new rates."""

from __future__ import annotations

import itertools

import pytest
import torch

from econmt.data.batching.batches import Batch
from econmt.engine.graphs import GraphedStep
from econmt.engine.precision import precision_of
from econmt.engine.step import TrainingStep
from econmt.model import Implementations
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from tests.unit.engine.toy import assert_same_bits, parameters, tiny_recipe

pytestmark = pytest.mark.cuda

SHAPES = (Shape(8, 7, 6), Shape(8, 3, 5), Shape(6, 5, 6))
"""No two alike but for their rows: rows that are filled up change the rounding of sums."""
CHANGES = (
    "model.dropout=0.2",
    "training.label_smoothing=0.1",
    "training.optimizer={name: adam, learning_rate: 0.01}",
    "training.gradient_clipping={type: norm, threshold: 0.05}",
    "training.loss_scale=256",
)


def make_step(precision: str = "float32", *changes: str) -> TrainingStep:
    """A step whose ops are named: what "auto" means in a graph is another choice than outside of one."""
    task = TranslationTask(tiny_recipe(*CHANGES, *changes), 90, 90)
    torch.manual_seed(5)
    model = task.build_model().train().cuda()
    how = Implementations.everywhere("recompute", "outputs")
    return TrainingStep(task, model, precision_of(precision, torch.device("cuda")), implementations=how)


def some_batches(step: TrainingStep) -> list[Batch]:
    torch.manual_seed(6)
    return [step.task.example(shape) for shape in SHAPES]


def learn(step: TrainingStep, graphed: GraphedStep | None, count: int) -> list[tuple[float, float]]:
    """Losses and norms of six updates of ``count`` batches."""
    batches = some_batches(step)
    found = []
    for update in range(6):
        step.optimizer.set_learning_rate(0.01 / (update + 1))
        result = (graphed or step)([batches[(update + part) % len(batches)] for part in range(count)])
        found.append((float(result.loss), float(result.norm)))
    return found


NARROW = "training.param_dtype=bfloat16"
BACKWARD = "training.optimizer_in_backward="
BY_VALUE = "training.gradient_clipping={type: value, threshold: 0.001}"


@pytest.mark.parametrize(
    ("precision", "count", "eager_changes", "changes"),
    [
        *((precision, n, (), ()) for precision in ("float32", "tf32", "bfloat16", "float16") for n in (1, 3)),
        pytest.param(
            "bfloat16", 1, (BY_VALUE, f"{BACKWARD}never"), (BY_VALUE, f"{BACKWARD}auto"), id="in backward"
        ),
        # The number of the update is on the device; graphs and steps of their own round alike.
        pytest.param("bfloat16", 1, (NARROW,), (NARROW,), id="parameters in bfloat16"),
    ],
)
def test_equals_the_step_launched_kernel_by_kernel(
    precision: str, count: int, eager_changes: tuple[str, ...], changes: tuple[str, ...]
) -> None:
    eager, step = make_step(precision, *eager_changes), make_step(precision, *changes)
    updates = [each.backward_updates is not None for each in (eager, step)]
    assert updates == [False, f"{BACKWARD}auto" in changes]
    if count > 1:
        eager.prepare(gradients=True)
        eager.keeps_gradients = True
    wanted = learn(eager, None, count)
    notes: list[str] = []
    graphed = GraphedStep(step, several=count > 1, note=notes.append)
    for batch in sorted(some_batches(step), key=lambda batch: -batch.source.numel()):
        graphed.capture(batch)
    assert learn(step, graphed, count) == wanted
    assert notes == []
    assert graphed.captured == len(SHAPES) if changes else graphed.captured >= 2
    assert_same_bits(parameters(step.model), parameters(eager.model))


@pytest.mark.parametrize("clipping", ["norm", "none"])
@pytest.mark.parametrize("count", [1, 3])
def test_replays_skip_overflows_and_change_the_scale(count: int, clipping: str) -> None:
    """Within a graph as launched kernel by kernel: no update where gradients overflow, and a scale that falls and grows."""
    scale = (f"training.loss_scale={2**30}", "training.loss_scale_window=2")
    changes = (*scale, f"training.gradient_clipping={{type: {clipping}, threshold: 0.05}}")
    eager, step = make_step("float16", *changes), make_step("float16", *changes)
    eager.prepare(gradients=count > 1)
    eager.keeps_gradients = count > 1
    graphed = GraphedStep(step, several=count > 1)
    batches = some_batches(step)
    scales, skipped = [step.loss_scale.state()[0]], 0
    for update in range(30):
        before = parameters(step.model)
        chosen = [batches[(update + part) % len(batches)] for part in range(count)]
        result = graphed(chosen)
        overflows = not bool(result.norm.isfinite())
        assert float(result.loss_scale) == scales[-1]
        eager(chosen)
        assert step.loss_scale.state() == eager.loss_scale.state()
        assert_same_bits(parameters(step.model), parameters(eager.model))
        changed = any(not torch.equal(before[name], part) for name, part in parameters(step.model).items())
        assert changed is not overflows
        scales.append(step.loss_scale.state()[0])
        assert scales[-1] == scales[-2] / 2 if overflows else scales[-1] >= scales[-2]
        skipped += overflows
    assert {int(state["step"]) for state in step.optimizer.state.values()} == {30 - skipped}
    assert 5 < skipped < 30
    assert any(later > earlier for earlier, later in itertools.pairwise(scales))


def test_a_step_launched_between_replays_changes_no_later_one() -> None:
    """Validation, and a shape that could not be captured, run between replays."""
    found = []
    for between in (False, True):
        step = make_step()
        graphed = GraphedStep(step)
        batches = some_batches(step)
        graphed([batches[0]])
        if between:
            state = step.random_state()
            moved = batches[1].to("cuda")
            kept = parameters(step.model)
            step.gradient([moved], step.tokens([moved]))
            step.clear()
            assert_same_bits(parameters(step.model), kept)
            step.set_random_state(state)
            torch.cuda.empty_cache()
        found.append((float(graphed([batches[0]]).loss), parameters(step.model)))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])
