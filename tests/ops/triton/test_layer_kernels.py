"""The kernels around an LSTM layer's recurrence against PyTorch's own operators."""

from __future__ import annotations

import pytest
import torch

from econmt_ops.backends.triton import layer_kernels
from econmt_ops.backends.triton.layer_kernels import PARTIALS, column_sums, counters_of_sums, preparation


@pytest.mark.parametrize(("rows", "width"), [(1, 4), (5, 20), (100, 70), (3000, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_column_sums(device: str, rows: int, width: int, dtype: torch.dtype) -> None:
    values = torch.randn(rows, width, device=device).to(dtype)
    counters, before = counters_of_sums(width), 3
    workspace = torch.full((before + counters + PARTIALS * width,), 7, dtype=torch.int32, device=device)
    workspace[before : before + counters] = 0
    sums = torch.empty(width, device=device)
    column_sums(values, sums, workspace, before, before + counters)
    torch.testing.assert_close(sums, values.float().sum(0), rtol=1e-4, atol=1e-3)
    assert (workspace[:before] == 7).all()


@pytest.mark.parametrize("biases", [0, 1, 2])
@pytest.mark.parametrize(("size", "wide"), [(6, 6), (6, 8)])
@pytest.mark.parametrize("padded", [False, True])
def test_preparing_a_layer(device: str, biases: int, size: int, wide: int, padded: bool) -> None:
    torch.manual_seed(0)
    steps, batch, hidden = 4, 3, 5
    inputs = torch.randn(batch, steps, size, device=device)
    lengths = torch.tensor([2, 4, 0], device=device)
    read = inputs.clone()
    if padded:
        inside = torch.arange(steps, device=device) < lengths.unsqueeze(1)
        inputs[~inside], read[~inside] = float("nan"), 0.0
    weight, recurrent = torch.randn(20, size, device=device), torch.randn(20, hidden, device=device)
    recurrent *= torch.logspace(-30, 30, 20, device=device)[:, None]
    recurrent[3] = 0.0
    given = tuple(torch.randn(20, device=device) for _ in range(2))
    rows = torch.full((steps * batch, wide), float("nan"), dtype=torch.float16, device=device)
    matrix = torch.full((20, wide), float("nan"), dtype=torch.float16, device=device)
    square = torch.full((20, hidden), float("nan"), dtype=torch.float16, device=device)
    factors, bias = torch.empty(20, device=device), torch.empty(20, device=device)
    workspace = torch.full((9,), 7, dtype=torch.int32, device=device)
    tensors = (
        inputs.transpose(0, 1),
        rows,
        weight,
        matrix,
        recurrent,
        square,
        factors,
        *given,
        bias,
        workspace,
        lengths,
    )
    types = tuple(part.dtype for part in tensors)
    shapes = (steps, batch, size), padded, size, wide, hidden
    launch, programs, *ends = preparation(*shapes, (True, True), True, biases, 5, types)
    launch(programs, tensors, (steps, batch, 5, *ends), (size, steps * size, size, hidden))
    torch.testing.assert_close(rows[:, :size], read.transpose(0, 1).reshape(-1, size).half(), rtol=0, atol=0)
    torch.testing.assert_close(matrix[:, :size], weight.half(), rtol=0, atol=0)
    assert not rows[:, size:].any()
    assert not matrix[:, size:].any()
    # Each row is multiplied by a power of two, so that float16 holds it.
    assert (factors.log2() == factors.log2().round()).all()
    torch.testing.assert_close(
        square.double() / factors.double()[:, None], recurrent.double(), rtol=5e-4, atol=0
    )
    if biases:
        torch.testing.assert_close(bias, torch.stack(given[:biases]).sum(0))
    assert workspace.tolist() == [0] * 5 + [7] * 4


def test_only_zeros_are_made(device: str) -> None:
    workspace = torch.full((layer_kernels._TILE + 2,), 7, dtype=torch.int32, device=device)
    zeros = layer_kernels._TILE + 1
    launch, programs, *ends = preparation(
        None, False, 0, 0, 8, (False, False), False, 0, zeros, (torch.int32,) * 12
    )
    launch(programs, [workspace] * 12, (0, 0, zeros, *ends), (0, 0, 0, 0))
    assert workspace.sum() == 7
