from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt_ops.products import reversal as module

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
