"""Each bench gives the rows that it says, with figures that belong together; on clocks of our own where time decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from econmt.bench import selection, training
from econmt.bench.rows import Row
from econmt.config.recipe import Recipe, load_recipe
from econmt.engine.precision import Precision
from econmt.model import Implementations
from econmt.training.choice import Shape
from tests.unit.bench.clock import Clock, made_up_times

CPU = torch.device("cpu")
clock = pytest.fixture(made_up_times)
SMALL = (
    "model.embedding=6",
    "model.encoder.size=8",
    "model.decoder.size=8",
    "model.attention.size=5",
    "training.batch.size=3",
)


def chosen_for(recipe: Recipe) -> selection.Chosen:
    """What measuring chooses on the CPU for small batches."""
    options: dict[str, Any] = {"compiled": False, "byte_limit": None, "updates": 1.0}
    return selection.choose(recipe, (20, 30), Shape(3, 4, 5), CPU, Precision(), seconds=5.0, **options)


def by(rows: list[Row], *names: str) -> set[tuple[Any, ...]]:
    return {tuple(row[name] for name in names) for row in rows}


def test_the_choice_for_a_recipe(clock: Clock) -> None:
    clock.rounds = [{"recompute/gates": 1.0, "reference": 0.8}] * 3 + [{"recompute": 1.0, "reference": 2.0}]
    found = chosen_for(load_recipe("iwslt", SMALL))
    assert found.implementations == Implementations(
        "reference", "reference", "recompute", "recompute", "gates"
    )
    rows = selection.rows_of(found.measurements)
    assert by(
        [row for row in rows if str(row["problem"]).startswith("attentional_lstm")], "candidate", "chosen"
    ) == {("reference", "chosen"), ("recompute/gates", " (rule)")}
    regrets = {
        row["candidate"]: row["regret"] for row in rows if str(row["problem"]).startswith("linear_cross")
    }
    assert regrets == {"recompute": 0.0, "reference": pytest.approx(1.0)}


def test_training_steps() -> None:
    recipe = load_recipe("quickstart", [*SMALL, "ops.decoder=reference"])
    row = training.row_of("quickstart", recipe, "float32", 5, CPU, 0.0)
    assert (row["bench"], row["batch"], row["length"], row["samples"]) == ("training", 3, 5, training.LEAST)
    assert float(row["target tokens/s"]) == pytest.approx(3 * 5 / (float(row["milliseconds"]) / 1e3))
    assert int(row["feature map bytes"]) > int(row["of them attention"]) > 0


def test_training_steps_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("full\nof it")

    monkeypatch.setattr(training, "measure_step", fail)
    row = training.row_of("quickstart", load_recipe("quickstart", SMALL), "float32", 3, CPU, 0.0)
    assert row["failure"] == "full"
