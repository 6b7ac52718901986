from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt_ops.backends.triton import cells
from tests.ops.helpers import assert_close

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def reference(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Values of which each row is a slice of a longer row of NaN."""
    longer = torch.full((*shape[:-1], shape[-1] + 3), torch.nan, dtype=dtype, device=device)
    longer[..., : shape[-1]] = torch.randn(shape, dtype=torch.float64).to(dtype)
    return longer[..., : shape[-1]]


def empty(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return random(*shape, dtype=dtype, device=device).fill_(torch.nan)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 5), (3, 33), (2, 256), (2, 300)])
def test_a_step_and_its_gradients(rows: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(rows + hidden)
    tolerance = TOLERANCE[dtype]
    gates = random(rows, 4 * hidden, dtype=dtype, device=device)
    before = random(rows, hidden, dtype=torch.float32, device=device)
    dh = [random(rows, hidden, dtype=dtype, device=device) for _ in range(2)]
    dc = random(rows, hidden, dtype=torch.float32, device=device)
    leaves = [value.double().requires_grad_() for value in (gates, before)]
    h, c = reference(*leaves)
    wanted = torch.autograd.grad([h, c], leaves, [dh[0].double() + dh[1].double(), dc.double()])
    alone = torch.autograd.grad(reference(*leaves), leaves, [dh[0].double(), dc.double()])

    after = empty(rows, hidden, dtype=torch.float32, device=device)
    places = [empty(rows, hidden, dtype=dtype, device=device) for _ in range(3)]
    kept = gates.clone()
    cells.forward(gates, before, after, places)
    assert torch.equal(gates, kept)
    assert_close([after], [c], 1e-6)
    for place in places:
        assert_close([place], [h], tolerance)

    dgates, dbefore = empty(rows, 4 * hidden, dtype=dtype, device=device), dc.clone()
    cells.backward(gates, before, after, dh, dbefore, dgates)
    assert_close([dgates], [wanted[0]], tolerance)
    assert_close([dbefore], [wanted[1]], tolerance)
    cells.backward(gates, before, after, dh[:1], dc, gates)
    assert_close([gates], [alone[0]], tolerance)
    assert_close([dc], [alone[1]], tolerance)


def test_tanh_keeps_the_digits_of_small_values(device: str) -> None:
    values = torch.cat([torch.logspace(-8, 1.5, 400), torch.tensor([0.49999, 0.5, 0.50001, 100.0])]).to(
        device
    )
    gates = torch.full((1, 4 * len(values)), 100.0, device=device)
    gates[0, 2 * len(values) : 3 * len(values)] = values
    before, after, h = torch.zeros(3, 1, len(values), device=device)
    cells.forward(gates, before, after, [h])
    exact = values.double().tanh()
    assert ((after[0].double() - exact).abs() / exact).max() < 4e-7


def test_what_is_no_number_stays_none(device: str) -> None:
    gates = torch.zeros(1, 4 * 3, device=device)
    gates[0, 7] = torch.nan
    before, after, h = torch.zeros(3, 1, 3, device=device)
    cells.forward(gates, before, after, [h])
    assert h.isnan().tolist() == [[False, True, False]]
