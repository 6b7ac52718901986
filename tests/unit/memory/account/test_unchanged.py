"""Predictions change nothing that the step can reach; the fixture of these tests compares it before and after."""

from __future__ import annotations

import os
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from econmt import memory
from tests.unit.memory.account import models

Change = Callable[[Tensor], object]
TOTAL: object = 0.0


class Slots:
    """An object without a dictionary, and a class with state."""

    __slots__ = ("last", "never")
    seen: object = None

    def __init__(self) -> None:
        self.last: object = 0.0


@dataclass(frozen=True)
class Closed:
    """An object that refuses to be changed."""

    last: object = 0.0


class Counts:
    """An iterator in Python."""

    def __init__(self) -> None:
        self.count = 0

    def __next__(self) -> int:
        self.count += 1
        return self.count

    __iter__ = iter


@cache
def table(size: int) -> dict[str, Tensor]:
    return {"ones": torch.ones(size)}


@lru_cache(maxsize=2)
def mask(size: int) -> Tensor:
    return torch.ones(size)


def variable() -> Change:
    running: Any = 0.0

    def change(loss: Tensor) -> None:
        nonlocal running
        running = 0.9 * running + 0.1 * loss

    return lambda loss: change(loss)


def of_module(loss: Tensor) -> None:
    global TOTAL, NEW
    TOTAL = NEW = loss  # type: ignore[name-defined]
    models.LONG["GPT"] = models.last = loss  # type: ignore[assignment, attr-defined]
    of_module.last = loss  # type: ignore[attr-defined]


def attributes() -> Change:
    slots, closed = Slots(), Closed()

    def change(loss: Tensor) -> None:
        object.__setattr__(closed, "last", loss)
        slots.last = slots.never = Slots.seen = loss  # type: ignore[attr-defined]
        closed.__dict__["more"] = Slots.more = loss  # type: ignore[attr-defined]

    return change


def containers() -> Change:
    counter, ordered, array = Counter("ab"), OrderedDict(a=1, b=2), np.zeros(3)
    weak: Any = WeakKeyDictionary({Slots: 1})
    frozen = np.zeros(2)
    frozen.flags.writeable = False

    def change(loss: Tensor) -> None:
        counter["a"] += 1
        ordered.move_to_end("a")
        ordered["c"] = loss  # type: ignore[assignment]
        weak[Closed] = loss
        array[frozen.astype(int)] += loss.item()

    return change


def generators() -> Change:
    own = random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator()

    def change(_: Tensor) -> None:
        own[0].random(), own[1].random(), own[2].rand(), torch.rand(2, generator=own[3])
        random.random(), np.random.rand(), torch.rand(2), torch.manual_seed(3)

    return change


def caches() -> Change:
    table(1), mask(1)

    def change(loss: Tensor) -> None:
        table(1)["loss"] = loss + table(2)["ones"].sum() + mask(2).sum()

    return change


def iterators() -> Change:
    counts = Counts()
    return lambda _: next(counts)


@pytest.mark.parametrize(
    "make", [variable, lambda: of_module, attributes, containers, generators, caches, iterators]
)
def test_what_a_step_changes_is_as_before(make: Callable[[], Change]) -> None:
    model, inputs, change = nn.BatchNorm1d(8), torch.randn(4, 8), make()

    def step() -> None:
        loss = model(inputs).square().sum()
        loss.backward()
        change(loss.detach())

    step()
    memory.predict(step, model, device="cpu")
    step()
    assert type(mask(2)) is Tensor


@pytest.mark.parametrize("kind", ["variable", "attribute"])
def test_what_a_step_replaces_counts_once(kind: str) -> None:
    model, state = nn.Linear(64, 64), Slots()
    hidden = state.last = torch.zeros(512, 64)

    def step() -> None:
        nonlocal hidden
        outputs = model(hidden if kind == "variable" else state.last)
        outputs.square().mean().backward()
        model.zero_grad()
        if kind == "variable":
            hidden = outputs.detach().tanh()
        else:
            state.last = outputs.detach().tanh()

    if kind == "variable":
        state.last = None
    else:
        hidden = None  # type: ignore[assignment]
    predicted = memory.predict(step, model, device="cpu")
    step()
    step()
    with memory.track(model) as account:
        step()
    assert predicted.peak_bytes == account.peak_bytes


def training(batches: Iterator[Any]) -> tuple[Callable[[], None], nn.Linear]:
    model, losses = nn.Linear(64, 256), list[float]()

    def step() -> None:
        (inputs,) = next(batches)
        loss = model(inputs).square().mean()
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())

    return step, model


def test_iterators_are_refused_by_name_or_read_by_a_process_of_its_own(tmp_path: Path) -> None:
    rows = torch.randn(6, 32, 64)
    loader = DataLoader(TensorDataset(rows), batch_size=None)
    for batches, name in (
        (((row,) for row in rows), r"'batches' \(generator\)"),
        (zip(rows, strict=True), r"'batches' \(zip\)"),
        (iter(loader), r"'batches\._sampler_iter' \(\w+iterator\)"),
    ):
        step, model = training(batches)
        with pytest.raises(ValueError, match=f"^memory.predict: {name} would be used up; .* isolated=True$"):
            memory.predict(step, model, device="cpu")
        account = memory.predict(step, model, device="cpu", isolated=True)
        assert account.by_category()["weights"] == sum(each.nbytes for each in model.parameters())
        assert torch.equal(next(batches)[0], rows[0])
    path = tmp_path / "lines"
    path.write_text("1\n2\n")
    with path.open() as lines:
        step, model = training((torch.full((4, 64), float(line)),) for line in lines)
        with pytest.raises(
            ValueError, match=r"\(TextIOWrapper\) would be used up; read from it before the step$"
        ):
            memory.predict(step, model, isolated=True)
    workers = iter(DataLoader(TensorDataset(rows), num_workers=1))
    with pytest.raises(ValueError, match=r"\(Connection\) would be used up"):
        memory.predict(training(workers)[0], isolated=True)


def test_an_account_from_a_process_of_its_own_is_whole(tmp_path: Path) -> None:
    case = models.gpt()
    accounts = [
        memory.predict(case.step, case.model, case.optimizer, isolated=each) for each in (False, True)
    ]
    here, there = (
        [
            [sizes for _, _, sizes in account.over_time()],
            account.advice(),
            account.tables(),
            account.notes,
            [account.ledger.allocated, account.ledger.reserved, account.names],
        ]
        for account in accounts
    )
    assert here == there
    for name in ("to_snapshot", "to_trace", "save"):
        getattr(accounts[1], name)(tmp_path / name)
    assert not memory.compare(*accounts).changes()


def test_errors_of_a_process_of_its_own_are_one_line() -> None:
    def fails() -> None:
        raise RuntimeError("first\nsecond")

    values = torch.arange(8)
    for step, message in (
        (fails, "RuntimeError: first second"),
        (lambda: values.repeat_interleave(values), "the shape of the result of .* depends on values"),
        (lambda: os._exit(3), r"the process ended without an account \(exit code 3\)"),
    ):
        with pytest.raises(ValueError, match=f"^memory.predict: {message}.*$"):
            memory.predict(step, isolated=True)


def test_a_profiler_in_the_step_is_predicted_and_refused_where_it_is_tracked() -> None:
    model, inputs = nn.Linear(64, 256), torch.randn(512, 64)

    def step(*, profiled: bool = True) -> None:
        with torch.profiler.profile(profile_memory=True) if profiled else torch.enable_grad():
            model(inputs).square().mean().backward()

    steps = step, lambda: step(profiled=False)
    step()
    peaks = {memory.predict(each, model, device="cpu").peak_bytes for each in steps}
    assert len(peaks) == 1
    with (
        pytest.raises(ValueError, match=r"^memory.track: the block cannot use PyTorch's profiler"),
        memory.track(model),
    ):
        step()
    with memory.track(model) as account:
        step(profiled=False)
    assert peaks == {account.peak_bytes}
