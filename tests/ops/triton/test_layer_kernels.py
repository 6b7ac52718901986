"""The kernels around an LSTM layer's recurrence, and of reversal, against PyTorch's own operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt_ops.backends.triton import layer_kernels
from econmt_ops.backends.triton.layer_kernels import PARTIALS, column_sums, counters_of_sums, preparation
from econmt_ops.products import reversal as module


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
    made = rows, weight, matrix, recurrent, square, factors, *given, bias
    tensors = inputs.transpose(0, 1), *made, workspace, lengths
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


LENGTHS = (5, 0, 1, 4)


def definition(values: Tensor, lengths: Tensor) -> Tensor:
    result = values.clone()
    for row, length in enumerate(lengths.tolist()):
        result[row, :length] = values[row, :length].flip(0)
    return result


@pytest.mark.parametrize("width", [1, 3, 16, 1030])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool], ids=str)
def test_rows_are_reversed_within_their_lengths(width: int, dtype: torch.dtype, device: str) -> None:
    draw = torch.Generator().manual_seed(1)
    values = (10 * torch.randn(len(LENGTHS), 5, width, generator=draw)).to(dtype)
    lengths = torch.tensor(LENGTHS)
    found = module._reverse_rows(values.to(device), lengths.to(device))
    assert found.dtype == dtype
    assert found.cpu().equal(definition(values, lengths))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)], ids=str)
def test_nothing_to_reverse(shape: tuple[int, ...], device: str) -> None:
    lengths = torch.full(shape[:1], shape[1], device=device)
    assert module._reverse_rows(torch.ones(shape, device=device), lengths).shape == shape


def test_gradient_is_reversed_too(device: str) -> None:
    """By the operator that a GPU's tensors take; rows whose memory is not contiguous."""
    values = torch.randn(3, 5, 4, device=device, dtype=torch.float64).transpose(1, 2).requires_grad_()
    lengths = torch.tensor([4, 2, 0], device=device)
    found = module._reverse_rows(values, lengths)
    incoming = torch.randn(3, 4, 5, device=device, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(found, values, incoming)
    assert found.equal(definition(values, lengths))
    assert gradient.equal(definition(incoming, lengths))
    assert module._reverse_rows(found, lengths).equal(values)


@pytest.mark.cuda
def test_a_graph_may_hold_it() -> None:
    values, lengths = torch.randn(3, 4, 5, device="cuda"), torch.tensor([4, 2, 0], device="cuda")
    module.reverse_rows(values, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = module.reverse_rows(values, lengths)
    lengths.copy_(torch.tensor([1, 3, 4]))
    graph.replay()
    assert found.equal(definition(values, lengths))
