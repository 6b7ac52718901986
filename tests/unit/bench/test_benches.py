"""Each bench gives the rows that it says, with figures that belong together; on clocks of our own where time decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from econmt.bench import layouts, selection, training
from econmt.bench import rows as rows_module
from econmt.bench.rows import Row
from econmt.bench.selection import GridEntry
from econmt.config.recipe import load_recipe
from econmt.engine.precision import Precision
from econmt.errors import InputError
from econmt.model import Implementations
from econmt.training.choice import Shape
from econmt_ops.dispatch import session
from econmt_ops.dispatch.timing import Timing
from tests.unit.engine.fake_cuda import use_fake_cuda

CPU = torch.device("cpu")
SMALL = (
    "model.embedding=6",
    "model.encoder.size=8",
    "model.decoder.size=8",
    "model.attention.size=5",
    "training.batch.size=3",
)


def say(_: str) -> None:
    """Nobody listens."""


class Clock:
    """Stands for `alternate`: calls each function once and tells the time given for its name, else its samples."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self.samples: dict[str, tuple[float, ...]] = {}

    def __call__(
        self, functions: dict[str, Callable[[], object]], seconds: float, **_: object
    ) -> dict[str, Timing]:
        assert seconds > 0
        for function in functions.values():
            function()
        samples = {name: self.samples.get(name, (1.0,) * 3) for name in functions}
        times = dict.fromkeys(functions, 1.0)
        if self.rounds:
            times |= {name: time for name, time in self.rounds.pop(0).items() if name in functions}
            samples = {name: (time,) * 3 for name, time in times.items()}
        return {name: Timing(times[name], times[name] / 2, 2.0, samples[name], 1.5) for name in functions}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Clock]:
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    found = Clock()
    monkeypatch.setattr(rows_module, "alternate", found)
    monkeypatch.setattr(session, "alternate", found)
    session.forget()
    yield found
    session.forget()


def by(rows: list[Row], *names: str) -> set[tuple[Any, ...]]:
    return {tuple(row[name] for name in names) for row in rows}


@pytest.mark.usefixtures("clock")
def test_layouts() -> None:
    found = list(layouts.LayoutTimer([torch.float32, torch.bfloat16], CPU, 1.0, say).products([(4, 6, 8)]))
    assert by(found, "dtype", "rows", "inputs", "outputs") == {("float32", 4, 6, 8), ("bfloat16", 4, 6, 8)}
    assert {row["what"] for row in found} == {"forward", "backward, X", "backward, W", "forward and backward"}
    assert all(row["milliseconds"] == 1000.0 and row["lowest decile"] == 500.0 for row in found)
    assert {row["GFLOP/s"] for row in found if row["what"] == "forward"} == {2 * 4 * 6 * 8 / 1e9}
    assert {row["GFLOP/s"] for row in found if row["what"] == "forward and backward"} == {6 * 4 * 6 * 8 / 1e9}
    assert {row["layout"] for row in found if row["library"] == "econmt_ops.linear"} == set(layouts.LAYOUTS)


def test_the_layouts_of_a_product_are_the_same_product() -> None:
    for functions in layouts._groups(4, 6, 8, torch.float32, CPU):
        products = [function() for function in functions.values()]
        shapes = [product[0].shape if isinstance(product, tuple) else product.shape for product in products]  # type: ignore[attr-defined]
        values = [product for product in products if isinstance(product, torch.Tensor)]
        for value in values:
            turned = value if value.shape == values[0].shape else value.t()
            torch.testing.assert_close(turned, values[0])
        assert {tuple(sorted(shape)) for shape in shapes} == {tuple(sorted(shapes[0]))}


@pytest.mark.usefixtures("clock")
def test_loops() -> None:
    found = list(layouts.LayoutTimer([torch.float32], CPU, 1.0, say).loops([(4, 8)]))
    assert {row["what"] for row in found} == {
        "loop of products",
        "loop of products and cells",
        "loop of backward products",
    }
    # Times are those of one step.
    assert [row["milliseconds"] for row in found] == pytest.approx([1000.0 / layouts.STEPS] * len(found))
    assert {row["outputs"] for row in found} == {32}


@pytest.mark.parametrize("op", ["lstm", "linear", "attentional_lstm", "linear_cross_entropy"])
def test_the_grid_measures_the_choice_again(clock: Clock, op: str) -> None:
    entry = GridEntry(op, 2, 3, 8, "float32")
    first, other = {
        "linear": ("reference/row", "reference/column"),
        "linear_cross_entropy": ("recompute", "reference"),
        "lstm": ("reference", "recompute/gates"),
        "attentional_lstm": ("recompute/gates", "reference"),
    }[op]
    clock.rounds = [{first: 1.0, other: 0.5}, {first: 1.0, other: 1.25}]
    clock.samples = {first: (1.0, 2.0, 1.0, 1.0, 1.0), other: (1.25, 2.5, 1.25, 1.2, 1.5)}
    (row,) = selection.regrets([entry], CPU, 1.0, 100.0, say)
    assert {name: row[name] for name in GridEntry._fields} == entry._asdict()
    assert (row["choice"], row["rule"], row["best"]) == (other, first, first)
    assert row["regret"] == pytest.approx(0.25)
    assert row["regret of the rule"] == 0.0
    assert row["milliseconds"] == 1250.0
    # The candidates took turns once more; where one of five turns went the other way it may be noise.
    clock.rounds = [{first: 1.0, other: 0.5}, {first: 1.0, other: 1.25}]
    clock.samples[other] = (1.25, 2.5, 1.25, 0.9, 1.5)
    (row,) = selection.regrets([entry], CPU, 1.0, 100.0, say)
    assert (row["regret"], row["turns"]) == (0.0, 5)
    assert row["regret with noise"] == pytest.approx(0.25)


def test_noise_is_told_from_loss() -> None:
    even = [1.0] * 20
    # Of 20 turns at most five may go the other way: fewer than six heads of 20 coins are 2 %, fewer than seven 6 %.
    assert selection.loss_of([0.9] * 5 + [1.1] * 15, even).beyond_noise == pytest.approx(0.1)
    assert selection.loss_of([0.9] * 6 + [1.1] * 14, even).beyond_noise == 0.0
    assert selection.loss_of([0.9] * 6 + [1.1] * 14, even).share == pytest.approx(0.1)
    # A disturbed turn disturbs both.
    assert selection.loss_of([1.1, 11.0, 1.1, 1.1, 1.1], [1.0, 10.0, 1.0, 1.0, 1.0]) == pytest.approx(
        (0.1, 0.1, 5)
    )
    # Too few turns excuse nothing.
    assert selection.loss_of([1.1, 0.9, 1.2, 1.3], [1.0] * 4).beyond_noise == pytest.approx(0.15)


def test_parts_share_the_grid() -> None:
    grid = selection.grid()
    parts = [selection.part_of(grid, f"{number}/3") for number in (1, 2, 3)]
    assert parts[1][:2] == [grid[1], grid[4]]
    assert sorted(entry for part in parts for entry in part) == sorted(grid)
    for text in ("0/3", "4/3", "1", "1/0", "a/b", "-1/3"):
        with pytest.raises(InputError, match="give i/n"):
            selection.part_of(grid, text)


def test_the_grid_is_as_published() -> None:
    grid = selection.grid()
    assert len(grid) == len(set(grid)) >= 40
    assert {entry.batch for entry in grid} >= {1, 512}
    assert {entry.hidden for entry in grid} >= {128, 1024}
    assert {entry.length for entry in grid} == {5, 25, 100}
    assert {entry.dtype for entry in grid} == {"float32", "bfloat16"}
    assert max(entry.operations for entry in grid) <= selection.MOST_OPERATIONS


def test_a_grid_ends_in_time() -> None:
    assert list(selection.regrets([GridEntry("linear", 1, 1, 8, "float32")], CPU, 1.0, -1.0, say)) == []


def test_the_summary_counts() -> None:
    shapes = [
        dict(zip(GridEntry._fields, map(str, entry), strict=True))
        for entry in (*selection.grid()[:2], selection.grid()[-1])
    ]
    figures = [(0.0, 0.5, 0.2), (0.02, 0.0, 0.02), (0.1, 0.1, 0.1)]
    rows = [
        {
            "bench": "select-grid",
            "choice": "a",
            "best": "b",
            **shape,
            "regret": str(mine),
            "regret of the rule": str(rule),
            "regret with noise": str(noisy),
        }
        for shape, (mine, rule, noisy) in zip(shapes, figures, strict=True)
    ]
    *_, whole = selection.summary(rows)
    assert tuple(whole) == selection.SUMMARY
    expected = {"op": "all", "shapes": 3, "within 5 %": 2, "rule within 5 %": 1, "perhaps noise": 1}
    assert {name: whole[name] for name in expected} == expected
    figures_of_all = [whole[name] for name in ("largest regret", "mean regret", "largest regret of the rule")]
    assert figures_of_all == pytest.approx([0.1, 0.04, 0.5])
    assert whole["mean regret of the rule"] == pytest.approx(0.2)
    shape = " ".join(rows[2][name] for name in GridEntry._fields)
    assert whole["worst shape"] == f"{shape}: a chosen, b is best"
    assert [row["op"] for row in selection.summary(rows)] == [*dict.fromkeys(s["op"] for s in shapes), "all"]
    # Files are joined shape by shape; what was measured last counts.
    again = {**rows[0], "regret": "0.3"}
    assert selection.joined([rows[2], rows[0], {"bench": "layout"}, again]) == [again, rows[2]]


def test_the_choice_for_a_recipe(clock: Clock) -> None:
    clock.rounds = [{"recompute/gates": 1.0, "reference": 0.8}] * 3 + [{"recompute": 1.0, "reference": 2.0}]
    recipe = load_recipe("iwslt", SMALL)
    found = selection.choose(
        recipe,
        (20, 30),
        Shape(3, 4, 5),
        CPU,
        Precision(),
        seconds=5.0,
        compiled=False,
        byte_limit=None,
        updates=1.0,
    )
    assert found.implementations == Implementations(
        "reference", "reference", "recompute", "recompute", "gates"
    )
    rows = selection.rows_of(found.measurements)
    assert by(
        [row for row in rows if str(row["problem"]).startswith("attentional_lstm")], "candidate", "chosen"
    ) == {
        ("reference", "chosen"),
        ("recompute/gates", " (rule)"),
    }
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


def test_layouts_in_graphs_are_timed_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_cuda(monkeypatch)
    calls: list[int] = []
    again = rows_module.in_graph(lambda: calls.append(1), CPU, 7)
    assert len(calls) == 2 + 7
    again()
    assert len(calls) == 2 + 7
    (first, *_) = layouts.LayoutTimer([torch.float32], CPU, 0.2, str, graph=True).products([(2, 3, 4)])
    assert first["launched"] == "in a graph"
    work = 2 * 2 * 3 * 4
    assert first["GFLOP/s"] == pytest.approx(work / float(first["milliseconds"]) / 1e6)
