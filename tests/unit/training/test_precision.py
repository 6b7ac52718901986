"""What ``precision: auto`` becomes, and that a run keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from econmt.recipe import load_recipe
from econmt.training import precision, products
from econmt.training.precision import automatic_precision, precision_of_run
from econmt.training.products import ProductTimes, time_products
from econmt.training.state import TrainingState
from tests.unit.training.tiny import Run, snapshot

CPU = torch.device("cpu")
FAST, SLOW = ProductTimes(2e-3, 1e-3), ProductTimes(1.2e-3, 1e-3)
MakeRun = Callable[..., Run]
Asked = list[tuple[tuple[int, int, int], torch.dtype]]


@pytest.fixture
def asked() -> Iterator[Asked]:
    products._timed.cache_clear()
    yield []
    products._timed.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, asked: Asked, seconds: dict[torch.dtype, float]) -> None:
    def take(sizes: tuple[int, int, int], dtype: torch.dtype) -> float:
        asked.append((sizes, dtype))
        return seconds[dtype] * sizes[0]

    monkeypatch.setattr(products, "_seconds", take)


def test_bfloat16_must_win_by_a_margin() -> None:
    assert ProductTimes(1.31, 1.0).fastest == torch.bfloat16
    assert ProductTimes(1.29, 1.0).fastest == torch.float32
    assert ProductTimes(1.0, 3.0).fastest == torch.float32


def test_products_are_timed_once_a_process(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, asked, {torch.float32: 2.0, torch.bfloat16: 1.0})
    assert time_products() == time_products() == ProductTimes(512.0, 256.0)
    assert [sizes for sizes, _ in asked] == [products._PROBE] * 2 + [products._SIZES] * 2


def test_an_imitated_bfloat16_is_not_timed_further(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, asked, {torch.float32: 1.0, torch.bfloat16: 40.0})
    assert time_products().fastest == torch.float32
    assert [sizes for sizes, _ in asked] == [products._PROBE] * 2


def test_the_shortest_of_a_few_products_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 10.0, 13.0, 20.0, 25.0, 30.0, 34.0, 40.0, 48.0])
    monkeypatch.setattr(products.time, "perf_counter", lambda: next(clock))
    assert products._seconds((2, 3, 4), torch.bfloat16) == 3.0


def test_what_auto_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "time_products", lambda: FAST)
    recipe = load_recipe("multi30k", [])
    found = precision_of_run(recipe, CPU)
    assert found.dtype == torch.bfloat16
    assert found.why == "auto: a matrix product takes 2.00 ms in float32, 1.00 ms in bfloat16"
    assert precision_of_run(recipe, CPU, "float32") == (torch.float32, "as the run began")
    assert precision_of_run(recipe, torch.device("cuda")).dtype == torch.float32
    named = load_recipe("multi30k", ["training.precision=float32"])
    assert precision_of_run(named, CPU, "bfloat16") == (torch.float32, "as the recipe says")
    small = load_recipe("multi30k", ["model.encoder.size=64", "model.decoder.size=64"])
    assert precision_of_run(small, CPU) == (torch.float32, "auto: too small a model to gain")
    monkeypatch.setattr(precision, "time_products", lambda: SLOW)
    assert precision_of_run(recipe, CPU).dtype == torch.float32


def test_models_together_have_the_precision_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "time_products", lambda: FAST)
    large = load_recipe("multi30k", [])
    small = load_recipe("multi30k", ["model.encoder.size=64", "model.decoder.size=64"])
    assert automatic_precision([small, large], CPU).dtype == torch.bfloat16
    assert automatic_precision([small, small], CPU).dtype == torch.float32


def test_a_run_keeps_the_precision_it_began_with(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "LEAST_SIZE", 1)
    monkeypatch.setattr(precision, "time_products", lambda: FAST)
    whole = make_run(name="whole")
    whole.train()
    assert "precision: bfloat16 (auto: a matrix product takes 2.00 ms" in whole.folder.log.read_text()
    make_run("training.max_updates=4", name="parts").train()
    # The machine was busy, or is another one: the run goes on as it began all the same, bit for bit.
    monkeypatch.setattr(precision, "time_products", lambda: SLOW)
    parts = make_run(name="parts")
    parts.train()
    assert "precision: bfloat16 (as the run began)" in parts.folder.log.read_text()
    assert snapshot(parts.folder) == snapshot(whole.folder)
    other = make_run(name="other")
    other.train()
    assert snapshot(other.folder) != snapshot(whole.folder)


def test_a_state_without_a_precision_is_of_a_time_when_auto_was_float32() -> None:
    text = TrainingState(precision="bfloat16").to_json()
    assert TrainingState.from_json(text, "here").precision == "bfloat16"
    line = ' "precision": "bfloat16",\n'
    assert line in text
    assert TrainingState.from_json(text.replace(line, ""), "here").precision == "float32"
