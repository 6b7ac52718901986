from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from econmt.budget.planner import BatchBudget, Planner
from econmt.model import Implementations
from tests.unit.training.tiny import Run, write_text

LEAN = Implementations.everywhere("recompute", "outputs")
UseRows = Callable[..., None]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"), {"train": 30, "valid": 6, "test": 4})


@pytest.fixture(scope="session")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of eight updates that nothing happened to."""
    return Run(text, tmp_path_factory.mktemp("whole") / "run").trained()


@pytest.fixture
def make_run(text: Path, tmp_path: Path) -> Callable[..., Run]:
    return lambda *overrides, name="run": Run(text, tmp_path / name, overrides)


@pytest.fixture
def use_rows(monkeypatch: pytest.MonkeyPatch) -> UseRows:
    """Makes all plans those of so many rows a micro-batch, without estimates."""

    def use(rows: int, implementations: Implementations = LEAN, decoding_rows: int = 3) -> None:
        def allot(planner: Planner) -> list[BatchBudget]:
            return [
                BatchBudget(*shape, min(rows, shape.rows), shape.source * shape.target, implementations)
                for shape in planner.shapes
            ]

        monkeypatch.setattr(Planner, "allot", allot)
        monkeypatch.setattr(Planner, "budget_of_whole_batches", lambda _: "2GiB")
        monkeypatch.setattr("econmt.budget.run_budget.search_rows", lambda *_: decoding_rows)

    return use
