"""The C library's walk around a scan against the mathematics of the cells in float64, at every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt_ops.backends import c as native
from econmt_ops.backends.c import scan_cells
from econmt_ops.cells.scan import CELLS, ScanCell, ScanInputs
from tests.ops.helpers import TOLERANCE, Make, assert_close, poisoned

pytestmark = pytest.mark.skipif(
    not native.is_built(), reason="econmt_ops was installed without its C library"
)


def walk(
    cell: ScanCell, products: Tensor, read: Tensor, first: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and the last c, row by row and step by step."""
    rows, last = [], []
    for row, length in enumerate(lengths.tolist()):
        c, found = first[row], [torch.zeros_like(first[row])] * products.shape[1]
        for t in range(length):
            parts, a, b = cell.start(products[row, t], first.shape[1])
            c = a * c + b
            found[t] = cell.finish(parts, c, read[row, t])
        rows.append(torch.stack(found))
        last.append(c)
    return torch.stack(rows), torch.stack(last)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", [*CELLS, "view"])
@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [(1, torch.float32), (33, torch.float32), (257, torch.float32), (40, torch.bfloat16)],
    ids=str,
)
def test_equals_the_mathematics(name: str, hidden: int, dtype: torch.dtype) -> None:
    """Rows that are full, empty and shorter; poison past them, and in memory that is written."""
    make, cell = Make("cpu", seed=3), CELLS["sru" if name == "view" else name]
    parts, lengths = cell.gates + (name == "view"), torch.tensor([5, 0, 3])
    products, read = make(3, 5, parts * hidden).to(dtype), make(3, 5, hidden).to(dtype)
    first, given, dlast = make(3, hidden), make(3, 5, hidden).to(dtype), make(3, hidden)
    leaves = [products.double(), read.double(), first.double()]
    for leaf in leaves:
        leaf.requires_grad_()
    expected = walk(cell, *leaves, lengths)
    marks = given.double(), dlast.double()
    dexpected = torch.autograd.grad(expected, leaves, marks, allow_unused=True)

    products, read, given = (poisoned(part, lengths) for part in (products, read, given))
    outputs = torch.full((3, 5, hidden), float("nan"), dtype=dtype)
    cells = torch.full((3, 5, hidden), float("nan"))
    inputs = ScanInputs(cell, products, None, read, first.float(), lengths)
    last = scan_cells.forward(inputs, outputs, cells)
    assert_close([outputs, last], expected, TOLERANCE[dtype])
    without = torch.full_like(outputs, float("nan"))
    assert scan_cells.forward(inputs, without, None).equal(last)
    assert without.equal(outputs)
    target = torch.full_like(products, float("nan"))
    dfirst, dread = scan_cells.backward(inputs, cells, given, dlast.float(), target)
    found = [target, dfirst] if dread is None else [target, dfirst, dread]
    wanted = [dexpected[0], dexpected[2]] if dread is None else [dexpected[0], dexpected[2], dexpected[1]]
    assert (dread is not None) == (name == "sru")
    assert_close(found, wanted, TOLERANCE[dtype])
    # In place, and with nothing from the outputs.
    again = torch.full_like(products, float("nan"))
    scan_cells.backward(inputs, cells, torch.zeros_like(given), dlast.float(), again)
    scan_cells.backward(inputs, cells, None, dlast.float(), products)
    assert products.equal(again)


def test_threads_and_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_FEW", 0)
    make, cell = Make("cpu", torch.float32), CELLS["sru"]
    products, read, first, dlast = make(2, 6, 3 * 70), make(2, 6, 70), make(2, 70), make(2, 70)
    inputs = ScanInputs(cell, products, None, read, first, None)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        wide, cells = torch.zeros(2, 9, 70), torch.zeros(2, 9, 70)
        outputs, kept = wide[:, 2:8], cells[:, 1:7]
        last = scan_cells.forward(inputs, outputs, kept)
        target = torch.empty_like(products)
        back = scan_cells.backward(inputs, kept, outputs, dlast, target)
        found.append([wide, cells, last, target, *back])
    for left, right in zip(*found, strict=True):
        assert isinstance(left, Tensor)
        assert left.equal(right)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", list(CELLS))
def test_a_state_that_is_not_a_number_stays(name: str) -> None:
    """A rectifier that compared only would hide it as 0."""
    cell = CELLS[name]
    products, read, lengths = torch.zeros(1, 2, cell.gates * 33), torch.zeros(1, 2, 33), torch.tensor([2])
    first, outputs = torch.full((1, 33), float("nan")), torch.zeros(1, 2, 33)
    last = scan_cells.forward(ScanInputs(cell, products, None, read, first, lengths), outputs, None)
    assert outputs.isnan().all()
    assert last.isnan().all()
