"""``python -m scripts.bench layout`` times the same product in every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from econmt_ops.dispatch.timing import Timing
from scripts.bench import frame, layout
from scripts.bench.frame import in_graph
from scripts.tests.conftest import Measured
from tests.unit.engine.fake_cuda import use_fake_cuda

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes a second."""

    def alternate(functions: dict[str, Callable[[], object]], *_: object, **__: object) -> dict[str, Timing]:
        for function in functions.values():
            function()
        return {name: Timing(1.0, 0.5, 2.0, (1.0,) * 3, 1.5) for name in functions}

    monkeypatch.setattr(frame, "alternate", alternate)


def by(rows: list[layout.Row], *names: str) -> set[tuple[object, ...]]:
    return {tuple(row[name] for name in names) for row in rows}


@pytest.mark.usefixtures("clock")
def test_layouts() -> None:
    found = list(layout.rows_of([torch.float32, torch.bfloat16], [(4, 6, 8)], CPU, 1.0))
    assert by(found, "dtype", "rows", "inputs", "outputs") == {("float32", 4, 6, 8), ("bfloat16", 4, 6, 8)}
    assert {row["what"] for row in found} == {"forward", "backward, X", "backward, W", "forward and backward"}
    assert {(row["milliseconds"], row["highest decile"]) for row in found} == {(1000.0, 2000.0)}
    assert {row["GFLOP/s"] for row in found if row["what"] == "forward"} == {2 * 4 * 6 * 8 / 1e9}
    assert {row["GFLOP/s"] for row in found if row["what"] == "forward and backward"} == {6 * 4 * 6 * 8 / 1e9}
    assert {row["layout"] for row in found if row["library"] == "econmt_ops.linear"} == set(layout.LAYOUTS)


def test_the_layouts_of_a_product_are_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    for functions in layout._groups(4, 6, 8, torch.float32, CPU):
        products = [function() for function in functions.values()]
        shapes = [product[0].shape if isinstance(product, tuple) else product.shape for product in products]  # type: ignore[attr-defined]
        values = [product for product in products if isinstance(product, torch.Tensor)]
        for value in values:
            turned = value if value.shape == values[0].shape else value.t()
            torch.testing.assert_close(turned, values[0])
        assert {tuple(sorted(shape)) for shape in shapes} == {tuple(sorted(shapes[0]))}
    use_fake_cuda(monkeypatch)
    calls: list[int] = []
    again = in_graph(lambda: calls.append(1), CPU, 7)
    assert len(calls) == 2 + 7
    again()
    assert len(calls) == 2 + 7
    (first, *_) = layout.rows_of([torch.float32], [(2, 3, 4)], CPU, 0.2, graph=True)
    work = 2 * 2 * 3 * 4
    assert first["GFLOP/s"] == pytest.approx(work / float(first["milliseconds"]) / 1e6)


def test_the_command(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PAPER", (2, 3, 4))
    rows = measured("layout", "--dtype", "float32", "--seconds", "0.01", "--device", "cpu")
    assert {row["dtype"] for row in rows} == {"float32"}
