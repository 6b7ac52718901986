"""Results remembered by the shapes of arguments are those that fake tensors find themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from econmt.config.recipe import load_recipe
from econmt.estimate import training_step
from econmt.estimate.techniques import Technique, estimate, techniques
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_memory.estimate import shape_cache
from econmt_memory.estimate.shape_cache import ShapeCache
from econmt_memory.measure.ledger import Ledger
from econmt_ops.core import chunks

aten = torch.ops.aten
SMALL = ("model.embedding=24", "model.encoder.size=32", "model.decoder.size=32", "model.attention.size=48")
TASK = TranslationTask(load_recipe("iwslt", SMALL), 97, 89)
ROWS = [(device, row) for device in ("cpu", "cuda") for row in techniques("auto", device, False)]


def account(ledger: Ledger) -> tuple[Any, ...]:
    return ledger.peak, ledger.entries, ledger.stash, ledger.flops, ledger.reserved, Counter(ledger.largest)


each_row = pytest.mark.parametrize(("device", "row"), ROWS, ids=lambda value: getattr(value, "name", value))


@pytest.mark.sampled(2)
@each_row
def test_ledgers_are_the_same(device: str, row: Technique, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(5, 9, 7)
    found = account(estimate(TASK, row, shape, device))
    monkeypatch.setattr(
        training_step, "ShapeCache", lambda _: lambda func, args, kwargs: func(*args, **kwargs)
    )
    assert found == account(estimate(TASK, row, shape, device))


@pytest.mark.sampled(2)
@each_row
def test_loops_of_which_few_steps_are_followed_give_the_same_ledger(
    device: str, row: Technique, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of two steps, and chunks of a few rows.
    monkeypatch.setattr(chunks, "_BLOCK_BYTES", 2 * 5 * 4 * 32 * 4)
    monkeypatch.setattr(import_module("econmt_ops.linear_cross_entropy.recompute"), "CHUNK_BYTES", 89 * 4 * 7)
    shape = Shape(5, 15, 13)
    few = estimate(TASK, row, shape, device)
    monkeypatch.setattr(training_step, "shortened", lambda _: nullcontext())
    every = estimate(TASK, row, shape, device)
    assert account(few) == account(every)
    phases = [Counter(moment.phase for moment in ledger.timeline) for ledger in (few, every)]
    assert phases[0] == phases[1]


def test_few_steps_of_a_long_loop_are_followed() -> None:
    (row,) = (each for device, each in ROWS if device == "cpu" and each.name == "all")
    calls: Counter[int] = Counter()
    known = ShapeCache.__call__

    def counted(self: ShapeCache, func: Any, args: Any, kwargs: Any) -> Any:
        calls[steps] += 1
        return known(self, func, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShapeCache, "__call__", counted)
        for steps in (10, 30):
            estimate(TASK, row, Shape(5, steps, steps), "cpu")
    assert calls[30] == pytest.approx(calls[10], rel=0.1)


@pytest.fixture
def run() -> Callable[..., Any]:
    """Runs an operator; the results of the first run are known to the second."""
    mode = FakeTensorMode()
    results = ShapeCache(mode)

    def twice(func: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [results(func, args, kwargs) for _ in range(2)]

    twice.mode = mode  # type: ignore[attr-defined]
    return twice


def fake(run: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with run.mode:
        return torch.empty(*shape, dtype=dtype)


def test_new_results_have_memory_of_their_own(run: Any) -> None:
    left, right = fake(run, 3, 4), fake(run, 4, 5).t().contiguous().t()
    found = run(aten.mm.default, left, right)
    memory = {each.untyped_storage()._cdata for each in (left, right, *found)}
    assert len(memory) == 4
    for each in found:
        assert isinstance(each, FakeTensor)
        assert (tuple(each.shape), each.dtype, each.device.type) == ((3, 5), torch.float32, "cpu")


def test_what_is_written_is_the_argument(run: Any) -> None:
    total, other = fake(run, 3, 4), fake(run, 3, 4)
    assert all(found is total for found in run(aten.add_.Tensor, total, other))
    assert all(found is other for found in run(aten.mul.out, total, total, out=other))


def test_views_share_memory_wherever_they_begin(run: Any) -> None:
    whole = fake(run, 6, 4)
    for row in range(3):
        for found in run(aten.select.int, whole, 0, row):
            assert found.untyped_storage()._cdata == whole.untyped_storage()._cdata
            assert found.storage_offset() == 4 * row
    (first, second), _ = run(aten.split.Tensor, whole, 3)
    assert (first.storage_offset(), second.storage_offset()) == (0, 12)


def test_other_arguments_are_another_result(run: Any) -> None:
    tensor = fake(run, 4)
    assert run(aten.div.Tensor, tensor, fake(run, 4, dtype=torch.float64))[1].dtype == torch.float64
    assert run(aten.div.Tensor, tensor, tensor)[1].dtype == torch.float32
    assert [len(run(aten.new_empty.default, tensor, [size])[1]) for size in (2, 3, 2)] == [2, 3, 2]
    # 1.0 equals 1, and sums of both differ in type.
    whole = fake(run, 4, dtype=torch.int64)
    assert run(aten.add.Scalar, whole, 1)[1].dtype == torch.int64
    assert run(aten.add.Scalar, whole, 1.0)[1].dtype == torch.float32
    assert run(aten.sum.default, tensor)[1].dtype == torch.float32
    assert run(aten.sum.default, tensor, dtype=torch.float64)[1].dtype == torch.float64
    assert run(aten.sum.default, tensor, dtype=torch.int64)[1].dtype == torch.int64
    square = fake(run, 3, 3)
    assert [run(aten.relu.default, each)[1].stride() for each in (square, square.t())] == [(3, 1), (1, 3)]


def test_it_does_remember(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left = fake(run, 3, 4)
    run(aten.mul.Tensor, left, left)
    monkeypatch.setattr(shape_cache, "_form", None)
    run(aten.mul.Tensor, left, fake(run, 3, 4))


def test_it_remembers_what_cannot_be_created_again(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forms: list[Any] = []
    made = shape_cache._form

    def noted(*arguments: Any) -> Any:
        forms.append(made(*arguments))
        return forms[-1]

    monkeypatch.setattr(shape_cache, "_KNOWN", {})
    monkeypatch.setattr(shape_cache, "_form", noted)
    assert run(aten.is_same_size.default, fake(run, 3, 4), fake(run, 3, 4)) == [True, True]
    assert forms == [shape_cache._UnknownError]
