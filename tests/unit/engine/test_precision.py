"""What ``precision: auto`` becomes, what a precision does, and how long its measurement holds."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from econmt.config.recipe import load_recipe
from econmt.engine import devices, precision
from econmt.engine import machine as module
from econmt.engine.machine import measured_today
from econmt.engine.precision import Precision, ProductTimes, precision_of, precision_of_run, time_products
from econmt_ops.backends import c as native
from econmt_ops.dispatch.measurements import MeasurementRecord, Store, machine
from tests.ops.simulated_gpu import simulated_gpu

CPU = torch.device("cpu")
SMALL = ["model.encoder.size=64", "model.decoder.size=64"]
FAST, SLOW = ProductTimes(2e-3, 1e-3), ProductTimes(1.2e-3, 1e-3)


def test_bfloat16_must_win_by_a_margin() -> None:
    assert ProductTimes(1.31, 1.0).bfloat16_pays
    assert not ProductTimes(1.29, 1.0).bfloat16_pays
    assert not ProductTimes(1.0, 3.0).bfloat16_pays


def test_8_bits_must_win_among_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"float32": 4.0, "bfloat16": 1.31, "int8": 1.0}
    monkeypatch.setattr(precision, "measured_today", lambda what, measure: times)
    assert precision.int8_pays()
    times["bfloat16"] = 1.29
    assert not precision.int8_pays()
    with native.without():
        monkeypatch.setattr(native, "is_built", lambda: False)
        assert not precision.int8_pays()
    found = precision._time_few_rows()
    assert found.keys() == times.keys()
    assert min(found.values()) > 0


@pytest.mark.parametrize(
    ("narrow", "sizes"), [(1.0, ["_SMALL_SIZES"] * 2 + ["_SIZES"] * 2), (80.0, ["_SMALL_SIZES"] * 2)]
)
def test_products_are_timed_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, narrow: float, sizes: list[str]
) -> None:
    """An imitated bfloat16 is timed with small sizes alone."""
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path))
    asked: list[tuple[int, int, int]] = []

    def take(of: tuple[int, int, int], dtype: torch.dtype) -> float:
        asked.append(of)
        return {torch.float32: 2.0, torch.bfloat16: narrow}[dtype] * of[0]

    monkeypatch.setattr(precision, "_seconds", take)
    found = time_products()
    assert found == time_products()
    assert asked == [getattr(precision, name) for name in sizes]
    assert found.bfloat16_pays == (narrow == 1.0)
    assert narrow > 1.0 or found == ProductTimes(512.0, 256.0)


def test_the_shortest_of_a_few_products_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 10.0, 13.0, 20.0, 25.0, 30.0, 34.0, 40.0, 48.0])
    monkeypatch.setattr(devices.time, "perf_counter", lambda: next(clock))
    assert precision._seconds((2, 3, 4), torch.bfloat16) == 3.0


def test_what_auto_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "time_products", lambda: FAST)
    recipe = load_recipe("multi30k", [])
    found = precision_of_run(recipe, CPU)
    assert found.dtype == torch.bfloat16
    text = "auto: a matrix product takes 2.00 ms in float32, 1.00 ms in "
    text += "bfloat16, which is chosen if 1.3 times as fast; measured once a day"
    assert found.why == text
    tf32 = "set by the recipe; a CPU has no TF32 and computes in float32"
    for changes, saved, allowed, why in (
        ([], "float32", False, "as at the beginning of the run"),
        (["training.precision=float32"], "bfloat16", False, "set by the recipe"),
        (["training.precision=tf32"], None, True, tf32),
        (SMALL, None, False, "auto: the model is too small for bfloat16 to be faster"),
    ):
        found = precision_of_run(load_recipe("multi30k", changes), CPU, saved)
        assert found == Precision(allow_tf32=allowed, why=why)
    monkeypatch.setattr(precision, "time_products", lambda: SLOW)
    assert precision_of_run(recipe, CPU).dtype == torch.float32


def test_what_a_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert precision_of("auto", cuda).name == "bfloat16"  # a prediction, of a GPU that is not here
    known = {(9, 0): "bfloat16", (8, 0): "bfloat16", (7, 5): "float16", (7, 0): "float16", (6, 1): "float32"}
    for capability, expected in known.items():
        with simulated_gpu(capability=capability):
            assert precision_of("auto", cuda).name == expected
            assert precision_of("auto", cuda, saved="tf32").name == "tf32"


@pytest.mark.parametrize(
    ("name", "allowed"), [("float32", False), ("tf32", True), ("bfloat16", True), ("float16", True)]
)
def test_a_name_says_in_which_type_and_how_float32_products_are_made(name: str, allowed: bool) -> None:
    libraries = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [library.allow_tf32 for library in libraries]
    found, product = precision_of(name, CPU), torch.ones(2, 2)
    assert found.name == name
    with found.autocast(CPU):
        assert (product @ product).dtype == found.dtype
    with found.products(torch.device("cuda")):
        assert [library.allow_tf32 for library in libraries] == [allowed] * 2
    assert [library.allow_tf32 for library in libraries] == before
    with found.products(CPU):
        assert [library.allow_tf32 for library in libraries] == before


def test_models_together_have_the_precision_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "time_products", lambda: FAST)
    large, small = load_recipe("multi30k", []), load_recipe("multi30k", SMALL)
    assert precision_of("auto", CPU, [small, large]).dtype == torch.bfloat16
    assert precision_of("auto", CPU, [small, small]).dtype == torch.float32


Clock = Callable[[], Mapping[str, float]]


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Measures something else each time."""
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    calls = itertools.count(1)
    return lambda: {"one": float(next(calls))}


def test_a_second_process_finds_what_the_first_measured_with_as_many_threads(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured_today("a", clock) == measured_today("a", clock) == {"one": 1.0}
    assert measured_today("b", clock) == {"one": 2.0}
    assert measured_today("a", clock) == {"one": 1.0}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert measured_today("a", clock) == {"one": 3.0}


def test_tomorrow_is_measured_anew(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_today("a", clock)
    Store().add(machine(torch.device("cpu")), {"op": {"rule": MeasurementRecord(1.0, 1.0, 1.0, 0, 0.0)}})

    class Tomorrow(dt.date):
        @classmethod
        def today(cls) -> dt.date:
            return dt.date(2999, 1, 1)

    monkeypatch.setattr(module.dt, "date", Tomorrow)
    assert measured_today("a", clock) == {"one": 2.0}
    (entries,) = json.loads(Store().path.read_text())["machines"].values()
    assert list(entries) == ["op", "a, 2999-01-01"]
