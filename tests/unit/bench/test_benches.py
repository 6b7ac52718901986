"""Each bench gives the rows that it says, with figures that belong together; on clocks of our own where time decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from econmt.bench import selection, training
from econmt.bench.rows import Row, append_csv, circumstances, draw, read_csv, shown, table
from econmt.config.recipe import Recipe, load_recipe
from econmt.engine.precision import Precision
from econmt.errors import InputError
from econmt.model import Implementations
from econmt.tasks.translation import TranslationTask
from econmt.training.choice import Shape
from econmt_ops.dispatch.session import Session
from tests.conftest import fails_with
from tests.unit.bench.clock import Clock, made_up_times

CPU = torch.device("cpu")
clock = pytest.fixture(made_up_times)
SMALL = (
    *("model.embedding=6", "model.encoder.size=8", "model.decoder.size=8"),
    *("model.attention.size=5", "training.batch.size=3"),
)


def chosen_for(recipe: Recipe) -> tuple[Session, Implementations]:
    """What measuring finds and chooses on the CPU for small batches."""
    task = TranslationTask(recipe, 20, 30)
    options: dict[str, Any] = {"compiled": False, "byte_limit": None, "updates": 1.0}
    return selection.choose(task, Shape(3, 4, 5), CPU, Precision(), seconds=5.0, **options)


def by(rows: list[Row], *names: str) -> set[tuple[Any, ...]]:
    return {tuple(row[name] for name in names) for row in rows}


def test_the_choice_for_a_recipe(clock: Clock) -> None:
    clock.rounds = [{"recompute/gates": 1.0, "reference": 0.8}] * 3 + [{"recompute": 1.0, "reference": 2.0}]
    measured, chosen = chosen_for(load_recipe("iwslt", SMALL))
    assert chosen == Implementations("reference", "reference", "recompute", "recompute", "gates")
    rows = selection.rows_of(measured.measurements.values())
    assert by(
        [row for row in rows if str(row["problem"]).startswith("attentional_lstm")], "candidate", "chosen"
    ) == {("reference", "chosen"), ("recompute/gates", " (rule)")}
    regrets = {
        row["candidate"]: row["regret"] for row in rows if str(row["problem"]).startswith("linear_cross")
    }
    assert regrets == {"recompute": 0.0, "reference": pytest.approx(1.0)}


def test_training_steps_have_their_figures() -> None:
    recipe = load_recipe("quickstart", [*SMALL, "ops.decoder=reference"])
    row = training.row_of("quickstart", recipe, "float32", 5, CPU, 0.0)
    assert (row["bench"], row["batch"], row["length"], row["samples"]) == ("training", 3, 5, training.LEAST)
    assert float(row["target tokens/s"]) == pytest.approx(3 * 5 / (float(row["milliseconds"]) / 1e3))
    assert int(row["feature map bytes"]) > int(row["of them attention"]) > 0


def test_training_steps_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "measure_step", fails_with(torch.OutOfMemoryError("full\nof it")))
    row = training.row_of("quickstart", load_recipe("quickstart", SMALL), "float32", 3, CPU, 0.0)
    assert row["failure"] == "full"


def test_a_csv_grows_and_keeps_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "figures.csv"
    assert read_csv(path) == ([], [])
    append_csv(path, [{"bench": "layout", "rows": 64, "milliseconds": 0.5}], {"torch": "2.13.0"})
    append_csv(path, [{"milliseconds": 0.25, "bench": "training", "recipe": "a,b"}], {"torch": "2.14.0"})
    assert path.read_text() == (
        'bench,rows,milliseconds,torch,recipe\nlayout,64,0.5,2.13.0,\ntraining,,0.25,2.14.0,"a,b"\n'
    )
    columns, rows = read_csv(path)
    assert columns == ["bench", "rows", "milliseconds", "torch", "recipe"]
    assert [row["milliseconds"] for row in rows] == ["0.5", "0.25"]


@pytest.mark.parametrize(
    "content", [b"a,b\n1,2\n", b"bench,b\n1,2,3\n", b"bench,b\n1\n", b"\xff\xfe\n", b'bench,b\n"1,2\n']
)
def test_other_files_are_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "figures.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"figures\.csv"):
        append_csv(path, [{"bench": "layout"}], {})
    assert path.read_bytes() == content


def test_circumstances_are_those_of_this_machine() -> None:
    found = circumstances(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["gpu"] == ""
    assert str(found["processor"])
    assert len(str(found["commit"])) in (0, 7)


def test_figures_are_shown_shortly() -> None:
    values: list[str | int | float] = ["row", 12, 12_345, 0.012345, 12.345, 1234.5]
    assert [shown(value) for value in values] == ["row", "12", "12,345", "0.0123", "12.3", "1,234"]


def test_a_table_has_the_columns_that_there_are() -> None:
    rows: list[Row] = [{"layout": "row", "rows": 64}, {"layout": "column", "rows": 16}]
    found = table(rows, ("layout", "rows", "failure"), "layouts")
    assert [column.header for column in found.columns] == ["layout", "rows"]
    assert list(map(str, found.columns[1].cells)) == ["64", "16"]


def test_a_picture_is_drawn_of_the_rows(tmp_path: Path) -> None:
    rows: list[Row] = [{"a": "x", "b": "", "ms": 1.5}, {"a": "y", "b": 2, "ms": 3.0}, {"a": "failed"}]
    draw(rows, tmp_path / "bars.png", label=("a", "b"), value="ms", title="bars")
    assert (tmp_path / "bars.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(InputError, match="nowhere"):
        draw(rows, tmp_path / "nowhere" / "bars.png", label=("a",), value="ms", title="bars")
