"""Launches for `compiling`: kernels around scans and of steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from econmt_ops.backends.protocol import CellStep, StepGradients
from econmt_ops.backends.triton import scan_cells, step_cells
from econmt_ops.cells.gru import GRU
from econmt_ops.cells.scan import CELLS, ScanInputs

HIDDEN = 512


def calls() -> dict[str, tuple[str, torch.dtype, int, bool]]:
    """By name: cell, type, parts of the products, and all options of a call."""
    return {
        "sru bfloat16": ("sru", torch.bfloat16, 3, False),
        "sru view float32": ("sru", torch.float32, 4, True),
        "ssru bfloat16": ("ssru", torch.bfloat16, 2, False),
        "qrnn bfloat16": ("qrnn", torch.bfloat16, 3, True),
        "gilr_lstm bfloat16": ("gilr_lstm", torch.bfloat16, 4, False),
        "gilr_lstm float32": ("gilr_lstm", torch.float32, 4, False),
        "min_lstm float64": ("min_lstm", torch.float64, 3, True),
    }


def call(name: str, dtype: torch.dtype, parts: int, options: bool) -> None:
    """Forward and backward of 2 rows of 16 steps."""
    products = torch.zeros(2, 16, parts * HIDDEN, dtype=dtype)
    values = torch.zeros(2, 16, HIDDEN, dtype=dtype)
    first = torch.zeros(2, HIDDEN, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    cells = values.to(first.dtype)
    lengths = torch.zeros(2, dtype=torch.int64) if options else None
    inputs = ScanInputs(CELLS[name], products, products[0, 0], values, first, lengths)
    scan_cells.forward(inputs, values, first, cells)
    dlast = first if options else None
    scan_cells.backward(inputs, cells, values, dlast, products, values)


STEPS = {"gru bfloat16": 3, "lnlstm bfloat16": 4, "lnlstm per gate bfloat16": 4}
"""The gates of cells whose kernels take a step."""


def step(name: str) -> None:
    """Forward and backward of a step of 2 rows, one of them perhaps padding."""
    products = torch.zeros(2, STEPS[name] * HIDDEN, dtype=torch.bfloat16)
    h = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    state = (h,) if STEPS[name] == 3 else (h, h.float())
    wide, narrow = torch.zeros(4 * HIDDEN), torch.zeros(HIDDEN)
    extra = [wide] * (2 if "per gate" in name else 3) + [narrow] * 2 if STEPS[name] == 4 else []
    padding = torch.zeros(2, dtype=torch.bool)
    sums = [part.expand(2, -1).contiguous() for part in extra]
    arguments = CellStep(GRU, products, products, state, extra, padding)  # whatever the cell
    step_cells.forward(arguments, state, h)
    step_cells.backward(arguments, state, state, h, StepGradients(products, products, sums))


def in_chunks() -> None:
    """As `call`, of each pass a kernel for the chunks and then one that walks."""
    chunks = scan_cells._chunks
    scan_cells._chunks = lambda *_: 2
    call(*calls()["gilr_lstm float32"])
    scan_cells._chunks = chunks


def launches() -> dict[str, Callable[[], None]]:
    """Launches by name."""
    return {
        **{name: partial(call, *options) for name, options in calls().items()},
        "gilr_lstm float32 chunks": in_chunks,
        **{name: partial(step, name) for name in STEPS},
    }
