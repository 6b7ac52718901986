from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt_ops.backends.steps import Workspace, cell_backward, cell_forward

ROWS, HIDDEN = 3, 5


def _given(seed: int) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    sizes = (4 * HIDDEN, HIDDEN, HIDDEN, HIDDEN, HIDDEN)
    return tuple(torch.randn(ROWS, size, dtype=torch.float64) for size in sizes)


def _activated(sums: Tensor) -> Tensor:
    i, f, g, o = sums.chunk(4, 1)
    return torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], 1)


@pytest.mark.parametrize("own", [True, False], ids=["own gates", "given gates"])
def test_steps_in_one_workspace_equal_the_definition(own: bool) -> None:
    room = Workspace(_given(0)[1])
    for seed in range(3):
        sums, c, *_ = _given(seed)
        h, after = torch.empty_like(c), torch.empty_like(c)
        gates = room.gates.copy_(sums) if own else sums.clone()
        room.advance(c, h, after, None if own else gates)
        wanted_h, wanted_c = cell_forward(sums, c)
        torch.testing.assert_close((h, after), (wanted_h, wanted_c))
        torch.testing.assert_close(gates, _activated(sums))


@pytest.mark.parametrize("into", ["own memory", "the gates", "a narrower type"])
@pytest.mark.parametrize("own", [True, False], ids=["own gates", "given gates"])
def test_steps_back_in_one_workspace_equal_the_definition(into: str, own: bool) -> None:
    room = Workspace(_given(0)[1])
    exact = {"rtol": 1e-12, "atol": 1e-12} if into != "a narrower type" else {"rtol": 1e-6, "atol": 1e-6}
    for seed in range(3):
        sums, before, incoming, dh, dc = _given(seed)
        _, after = cell_forward(sums, before)
        gates = _activated(sums)
        wanted, wanted_dbefore = cell_backward(gates, before, after, dh + incoming, dc)
        mine = room.gates.copy_(gates) if own else gates.clone()
        narrow = torch.float32 if into == "a narrower type" else torch.float64
        dgates = mine if into == "the gates" else torch.full_like(mine, torch.nan, dtype=narrow)
        kept_dc = dc.clone()
        dbefore = room.retreat(before, after, incoming, dh, dc, dgates, None if own else mine)
        torch.testing.assert_close(dgates.double(), wanted, **exact)
        torch.testing.assert_close(dbefore, wanted_dbefore)
        # It belongs to whoever called the backward pass.
        assert torch.equal(dc, kept_dc)


def test_gradients_of_h_may_come_in_two_types() -> None:
    sums, before, incoming, dh, dc = _given(0)
    room = Workspace(before)
    _, after = cell_forward(sums, before)
    narrow = incoming.to(torch.bfloat16), dh.to(torch.float32)
    dgates = torch.empty_like(sums)
    room.retreat(before, after, *narrow, dc, dgates, _activated(sums))
    total = narrow[0].double() + narrow[1].double()
    torch.testing.assert_close(dgates, cell_backward(_activated(sums), before, after, total, dc)[0])


def test_a_workspace_fits_only_its_own_shape_and_type() -> None:
    room = Workspace(torch.zeros(ROWS, HIDDEN))
    assert room.fits(torch.ones(ROWS, HIDDEN))
    assert not room.fits(torch.ones(ROWS + 1, HIDDEN))
    assert not room.fits(torch.ones(ROWS, HIDDEN, dtype=torch.float64))
