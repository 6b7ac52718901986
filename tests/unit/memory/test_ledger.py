"""The ledger counts what it says: every storage once, under the layer and category it belongs to."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt.config.recipe import Model
from econmt.engine.measurement import measure_step, track_step
from econmt.engine.step import TrainingStep
from econmt.model import Implementations, TranslationModel, layers
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_memory.measure.ledger import CATEGORIES, LAYERS, ledger_of
from econmt_memory.measure.tracker import Tracker
from econmt_memory.report.tables import format_bytes
from econmt_ops.backends import c as library
from econmt_ops.core.scopes import layer
from econmt_ops.dispatch.capture import release_workspaces
from econmt_ops.optimizers.fused import FusedOptimizer
from tests.unit.engine.toy import (
    ADAM,
    assert_same_bits,
    gradients,
    parameters,
    some_batch,
    step_of,
    tiny_recipe,
)
from tests.unit.memory.account.models import events_of


@pytest.fixture
def model() -> TranslationModel:
    torch.manual_seed(1)
    layers = {"layers": 1, "size": 8}
    sizes = {"embedding": 6, "encoder": layers, "decoder": layers, "attention": {"size": 5}}
    return TranslationModel(Model.model_validate({**sizes, "dropout": 0.1}), 11, 11)


def loss_of(model: TranslationModel) -> Callable[[], Tensor]:
    """A loss over a small batch that uses every parameter."""
    ids, lengths = torch.tensor([[4, 5, 3], [6, 3, 0]]), torch.tensor([3, 2])

    def loss() -> Tensor:
        hidden = model(ids, lengths, ids)
        with layer("output"):
            return (hidden @ model.output.weight.T + model.output.bias).exp().sum()

    return loss


def size_of(model: TranslationModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_rows_of_a_sparse_gradient_are_gradients(
    model: TranslationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_FEW", 0)
    step = step_of(model, loss_of(model), ADAM)
    step.prepare()
    track_step(tracker := Tracker(torch.device("cpu")), step, some_batch(5))
    left = Counter[str]()
    for storage, size in tracker.alive(len(tracker.changes)).items():
        if storage.category == "gradients":
            left[storage.layer] += size
    assert model.source_embedding.weight.grad.is_sparse
    # Of source and target, 4 words of 6 values that are not padding.
    assert left["embedding"] == 2 * 4 * 6 * 4
    assert left["output"] == model.output.weight.nbytes + model.output.bias.nbytes


def test_a_step_counted_by_hand(model: TranslationModel) -> None:
    """What is kept: an exponential keeps its result, a product its factors. u = 10 x 8 values are 320 bytes."""
    source = torch.ones(10, 11)

    def loss() -> Tensor:
        with layer("encoder"):
            hidden = (
                source @ model.output.weight
            ).exp()  # keeps source, which is no feature map, and the result
        with layer("output"):
            squared = hidden * hidden  # keeps hidden, which is counted already
            return squared.exp().sum()  # keeps its result

    weights = size_of(model)
    ledger = measure_step(step_of(model, loss), some_batch(10), timed=False)
    assert ledger.stash == {"encoder": 320, "output": 320}
    # Backward, d exp: its incoming gradient is an expanded scalar; then the product makes two of 320 bytes and their
    # sum while only encoder's result is still kept, and the squares and their exponential are gone.
    assert ledger.entries["weights", "embedding"] == 2 * 11 * 6 * 4
    assert ledger.category("weights") == weights
    assert ledger.entries["other", "other"] == source.nbytes + 8  # and the number of tokens
    assert ledger.category("feature maps") == 320
    assert ledger.category("workspace") - 3 * 320 in range(1, 32)  # and scalars
    assert ledger.peak == weights + source.nbytes + 8 + 320 + ledger.category("workspace")


def test_the_sum_of_the_parts_is_the_whole(model: TranslationModel) -> None:
    ledger = measure_step(step_of(model, loss_of(model), ADAM), some_batch(5), timed=False)
    assert ledger.share_of_peak is None
    assert ledger.peak == ledger.entries.total() == max(size for _, size, _ in ledger.timeline)
    assert ledger.peak == sum(ledger.category(category) for category in CATEGORIES)
    assert ledger.peak == sum(ledger.by_layer()[name] for name in LAYERS)
    assert all(size >= 0 for size in ledger.entries.values())
    size = size_of(model)
    assert ledger.category("weights") == size
    steps = 4 * len(list(model.parameters()))  # Adam counts its steps in one float a parameter
    assert ledger.category("optimizer state") == 2 * size + steps
    assert ledger.largest == sorted(ledger.largest, key=lambda tensor: -tensor.bytes)
    assert [*dict.fromkeys(phase for _, _, phase in ledger.timeline)] == ["forward", "backward", "optimizer"]
    assert ledger.timeline[1].bytes > ledger.timeline[0].bytes, "a change counts from its own point on"
    # The update leaves weights, gradients and state, and the batch.
    assert ledger.timeline[-1].bytes - 4 * size - steps in range(1, 200)


def test_gradients_that_are_added_up_are_gradients(model: TranslationModel) -> None:
    """Two backward passes in one step: at its end each gradient is one storage."""
    loss = loss_of(model)

    def twice() -> Tensor:
        torch.autograd.backward(loss())
        return loss()

    small = measure_step(step_of(model, loss), some_batch(5), timed=False)
    both = measure_step(step_of(model, twice), some_batch(10), timed=False)
    size = size_of(model)
    assert both.timeline[-1].bytes == small.timeline[-1].bytes
    # At the peak all gradients of the first pass are there.
    assert both.category("gradients") == size
    assert both.peak == both.entries.total()
    assert both.stash == small.stash


def test_a_batch_that_adds_to_gradients_finds_them(model: TranslationModel) -> None:
    step = step_of(model, loss_of(model))
    first = measure_step(step, some_batch(5), timed=False)
    later = measure_step(step, some_batch(5), accumulating=True, timed=False)
    size = size_of(model)
    assert later.timeline[0].bytes == first.timeline[0].bytes + size
    assert later.timeline[-1].bytes == first.timeline[-1].bytes
    assert later.category("gradients") == size
    assert first.peak < later.peak <= first.peak + size


def test_what_only_an_allocator_sees_is_in_the_account() -> None:
    """An allocator that had given out 1,000 bytes more than is known, and 300 inside of one operator."""
    weight = torch.ones(4, requires_grad=True)
    readings = iter([(1016, 0), (1016, 0), (1032, 1332), (1032, 0), (1048, 1048)])
    tracker = Tracker(torch.device("cpu"), meter=lambda: next(readings, (0, 0)))
    tracker.label(weight, "weights", "output")
    with tracker.recording():
        tracker.begin("forward")
        with layer("decoder"):
            hidden = weight.exp()
        value = hidden.sin()
        tracker.begin("backward")
        tracker.begin("optimizer")
    assert value.numel() == 4
    assert list(tracker.live()) == [1016, 1032, 1332, 1032, 1048]
    ledger = ledger_of(tracker)
    assert ledger.peak == ledger.entries.total() == 1332
    assert ledger.entries == {
        ("weights", "output"): 16,
        ("other", "other"): 1000,
        ("feature maps", "decoder"): 16,
        ("workspace", "decoder"): 300,
    }
    assert ledger.largest[0] == (300, (300,), "uint8", "workspace", "decoder", "aten.exp", "")


@pytest.mark.parametrize("implementation", ["reference", "recompute"])
def test_the_peak_is_what_the_process_takes(model: TranslationModel, implementation: str) -> None:
    """Against the profiler, which hears of every allocation and not of what it is for.

    The ledger follows tensor operations; the C library, which it cannot follow, takes less.
    """
    task = TranslationTask(tiny_recipe(ADAM, "training.gradient_clipping={type: none}"), 11, 11)
    step = TrainingStep(task, model, implementations=Implementations.everywhere(implementation))
    batch = task.example(Shape(64, 5, 5))
    tokens = step.tokens([batch])
    ledger = measure_step(step, batch, timed=False)
    peaks = []
    for how in (library.without(), nullcontext()):
        with how:
            step.run([batch], tokens)
            step.clear()
            with torch.profiler.profile(profile_memory=True) as profile:
                step.run([batch], tokens)
            step.clear()
        allocated = (each for each in events_of(profile) if each.tag.name == "Allocation")
        peaks.append(max(itertools.accumulate([each.extra_fields.alloc_size for each in allocated])))
    assert peaks[0] > 3 * ledger.timeline[0].bytes
    assert ledger.peak - ledger.timeline[0].bytes == pytest.approx(peaks[0], rel=0.02)
    assert peaks[1] <= peaks[0]


@pytest.mark.cuda
def test_on_a_gpu_the_peak_is_the_allocators(model: TranslationModel) -> None:
    task = TranslationTask(tiny_recipe(ADAM), 11, 11)
    step = TrainingStep(task, model.cuda())
    batch = task.example(Shape(64, 20, 20)).to("cuda")
    release_workspaces()
    ledger = measure_step(step, batch)
    assert ledger.device == "cuda"
    assert ledger.peak == ledger.entries.total() == ledger.allocated
    assert ledger.reserved >= ledger.peak
    release_workspaces()  # those of tests before, on other streams
    torch.cuda.reset_peak_memory_stats()

    def lean(phase: str, _: object) -> None:  # as it is captured
        if phase == "backward":
            release_workspaces()

    step.run([batch], step.tokens([batch]), on_phase=lean)
    assert ledger.peak == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.1)
    assert {"forward", "backward", "optimizer"} == {phase for phase, _ in ledger.milliseconds}


@pytest.mark.parametrize(
    "optimizer",
    [ADAM, "training.optimizer={name: sgd, learning_rate: 0.1, momentum: 0.9, weight_decay: 0.1}"],
)
@pytest.mark.parametrize("state", [False, True])
def test_nothing_has_changed_afterwards(model: TranslationModel, optimizer: str, state: bool) -> None:
    step, batch = step_of(model, loss_of(model), optimizer), some_batch(5)
    if state:
        step([batch])
    before = parameters(model)
    model.register_buffer("carried", torch.ones(3))
    accumulate = step.accumulate

    def carrying(*arguments: Any) -> Tensor:
        model.get_buffer("carried").add_(1.0)
        return accumulate(*arguments)

    step.accumulate = carrying  # type: ignore[method-assign, assignment]
    held = copy.deepcopy(list(step.optimizer.state.values()))
    random_state = torch.get_rng_state()
    assert measure_step(step, batch).category("optimizer state") > 0
    assert_same_bits(parameters(model), before)
    assert torch.equal(model.get_buffer("carried"), torch.ones(3))
    assert bool(step.optimizer.state) == state
    for then, now in zip(held, step.optimizer.state.values(), strict=True):
        assert_same_bits(now, then)
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_interruption_of_a_measurement_changes_nothing(
    model: TranslationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, batch = step_of(model, loss_of(model), ADAM), some_batch(5)
    before = parameters(model)

    def interrupted() -> None:
        TrainingStep.update(step)
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_step(step, batch)
    assert_same_bits(parameters(model), before)
    assert not step.optimizer.state
    assert not gradients(model)


def test_times_and_rates(model: TranslationModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clipped: list[float] = []
    clip = FusedOptimizer.clip

    def noted(optimizer: FusedOptimizer, kind: str, threshold: float) -> Tensor:
        norm = clip(optimizer, kind, threshold)
        clipped.append(float(norm))
        return norm

    monkeypatch.setattr(FusedOptimizer, "clip", noted)
    step = step_of(model, loss_of(model), "training.gradient_clipping={type: norm, threshold: 1.0}")
    ledger = measure_step(step, some_batch(5))
    assert len(clipped) == 4
    assert min(clipped) > 0.0
    layers = {"embedding", "encoder", "attention", "decoder", "output"}
    for phase in ("forward", "backward"):
        named = {name for (part, name), value in ledger.milliseconds.items() if part == phase and value > 0.0}
        assert layers <= named
    assert ledger.phase("optimizer") > 0.0
    assert ledger.seconds > 0.0
    assert ledger.tokens == 5
    # Products alone: 2 x 3 rows by the output layer once forward and twice backward, and much more.
    assert ledger.flops > 3 * 2 * 6 * 8 * 11
    assert 0.0 < (ledger.share_of_peak or 0.0) < 1.0
    total = sum(ledger.phase(phase) for phase in ("forward", "backward", "optimizer"))
    # Shares of one step, whatever the marks between the layers have taken.
    assert total == pytest.approx(1000.0 * ledger.seconds)
    assert ledger.timeline[-1].milliseconds == pytest.approx(total)
    ledger.take(2.0)
    assert sum(ledger.milliseconds.values()) == pytest.approx(2000.0)
    assert (ledger.seconds, ledger.timeline[-1].milliseconds) == (2.0, pytest.approx(2000.0))
    stamps = [moment.milliseconds for moment in ledger.timeline]
    assert stamps == sorted(stamps)


def test_bytes_in_words() -> None:
    words = [format_bytes(size) for size in (999, 1000, 2_500_000, 9_117_000_000)]
    assert words == ["999 B", "1.0 kB", "2.5 MB", "9.12 GB"]
    assert [format_bytes(-size) for size in (999, 1000, 2_500_000)] == ["-999 B", "-1.0 kB", "-2.5 MB"]


def test_the_stash_is_that_of_the_largest_micro_batch() -> None:
    weight, tracker = torch.ones(4, requires_grad=True), Tracker(torch.device("cpu"))
    tracker.label(weight, "weights", "output")
    with tracker.recording():
        for copies in (1, 50, 3):
            tracker.begin("forward")
            loss = torch.stack([weight.exp() for _ in range(copies)]).sum()
            tracker.begin("backward")
            torch.autograd.backward(loss)
        tracker.begin("optimizer")
    assert ledger_of(tracker).stash.total() == 50 * 16
