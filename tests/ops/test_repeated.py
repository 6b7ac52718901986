"""Inputs given as distinct rows: everywhere what the inputs written out give."""

from __future__ import annotations

import torch
from torch import Tensor

import econmt_ops
from econmt_ops import UniqueRows
from econmt_ops.dispatch.session import measuring
from tests.ops.helpers import Make

ROWS, BATCH, STEPS, WIDTH, HIDDEN = 4, 3, 5, 6, 7
LENGTHS = torch.tensor([4, 1, 2])


def some_places() -> Tensor:
    """Row 3 stands nowhere within the lengths, row 2 nowhere at all."""
    places = torch.tensor([[0, 1, 1, 0, 3], [1, 3, 3, 3, 3], [0, 0, 3, 3, 1]])
    assert places.shape == (BATCH, STEPS)
    return places


def test_measured_apart_from_inputs_written_out() -> None:
    """Choices by measurement tell both apart, but not the number of rows."""
    make = Make("cpu", torch.float32)
    layers = make.layers(WIDTH, HIDDEN, 1)
    with measuring(remember=False) as session:
        econmt_ops.lstm(make(BATCH, STEPS, WIDTH), layers)
        econmt_ops.lstm(UniqueRows(make(ROWS, WIDTH), some_places()), layers)
        econmt_ops.lstm(UniqueRows(make(ROWS + 1, WIDTH), some_places()), layers)
    plain, repeated = session.measurements
    assert "repeated" in repeated
    assert "repeated" not in plain
    assert session.measurements[repeated].calls == 2
