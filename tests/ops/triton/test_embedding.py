from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends.triton import embedding
from econmt_ops.products.look_up import add_look_up_gradient, look_up


def by_torch(incoming: Tensor, ids: Tensor, words: int, padding: int | None) -> Tensor:
    table = torch.zeros(words, incoming.shape[-1], dtype=torch.float64, requires_grad=True)
    functional.embedding(ids, table, padding).backward(incoming.double())
    return table.grad


@pytest.mark.sampled(7)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (4, 30)], ids=str)
@pytest.mark.parametrize("words", [1, 7, 40_000])
@pytest.mark.parametrize("width", [1, 130])
@pytest.mark.parametrize("padding", [None, 0])
def test_gradient(shape: tuple[int, ...], words: int, width: int, padding: int | None, device: str) -> None:
    """Words that are rare, frequent and absent, and ids of two and four bytes."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(words, shape, generator=draw)
    ids.view(-1)[1::2] = words - 1
    incoming = torch.randn(*shape, width, generator=draw)
    expected = by_torch(incoming, ids, words, padding)
    found = embedding.gradient(incoming.to(device), ids.to(device), words, -1 if padding is None else padding)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_half_precision_is_summed_in_float32(device: str) -> None:
    """In bfloat16 the sum would stop at 256."""
    ids = torch.zeros(600, dtype=torch.int64, device=device)
    found = embedding.gradient(torch.ones(600, 3, dtype=torch.bfloat16, device=device), ids, 2, -1)
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [[600.0] * 3, [0.0] * 3]


def test_nothing_looked_up(device: str) -> None:
    ids = torch.zeros(0, dtype=torch.int64, device=device)
    assert embedding.gradient(torch.zeros(0, 3, device=device), ids, 2, -1).eq(0).all()


@pytest.mark.parametrize("padding", [None, 2])
def test_look_up(padding: int | None, device: str) -> None:
    """The public function; its gradient may come in any layout."""
    table = torch.randn(9, 6, device=device, requires_grad=True)
    ids = torch.tensor([[1, 2, 2], [8, 1, 2]], device=device)
    incoming = torch.randn(6, 3, 2, device=device).permute(2, 1, 0)
    found = look_up(table, ids, padding)
    assert found.equal(table[ids])
    (gradient,) = torch.autograd.grad(found, table, incoming)
    torch.testing.assert_close(gradient.cpu().double(), by_torch(incoming.cpu(), ids.cpu(), 9, padding))


def test_is_registered_with_torch(device: str) -> None:
    table = torch.randn(9, 6, device=device, requires_grad=True)
    ids = torch.tensor([[1, 2, 2], [8, 1, 2]], device=device)
    torch.library.opcheck(torch.ops.econmt_ops.look_up.default, (table, ids, -1, torch.float32))
    torch.library.opcheck(torch.ops.econmt_ops.look_up.default, (table, ids, -1, torch.bfloat16))


@pytest.mark.parametrize(
    ("width", "dtype"), [(5, torch.bfloat16), (1030, torch.bfloat16), (5, torch.float16)], ids=str
)
@pytest.mark.parametrize("swapped", [False, True], ids=["batch first", "time first"])
def test_rows_of_another_type_have_a_gradient_of_the_tables(
    width: int, dtype: torch.dtype, swapped: bool, device: str
) -> None:
    """The gradient lies in memory in either order of the ids' axes, with rows that are further apart than wide."""
    draw = torch.Generator().manual_seed(3)
    # Values that the type holds: the interpreter does not round as a GPU does.
    table = torch.randn(9, width, generator=draw).to(dtype).float().to(device).requires_grad_()
    ids = torch.randint(9, (3, 4), generator=draw).to(device)
    rows = torch.ops.econmt_ops.look_up(table, ids, 2, dtype)
    assert rows.dtype == dtype
    assert rows.equal(table[ids].to(dtype))
    wide = torch.randn(*((4, 3) if swapped else (3, 4)), width + 3, generator=draw)
    incoming = wide.to(dtype).to(device)[..., :width]
    incoming = incoming.transpose(0, 1) if swapped else incoming
    found = embedding.gradient(incoming, ids, 9, 2, torch.float32)
    assert found.dtype == torch.float32
    expected = by_torch(incoming.cpu(), ids.cpu(), 9, 2)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-6, atol=1e-6)
    (through,) = torch.autograd.grad(rows, table, incoming)
    assert through.equal(found)


@pytest.mark.cuda
def test_under_autocast_rows_have_its_type() -> None:
    table = torch.randn(9, 6, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        rows = look_up(table, torch.tensor([1, 2], device="cuda"))
    assert rows.equal(table[[1, 2]].bfloat16())


@pytest.mark.cuda
def test_in_a_graph_repeats_are_equal() -> None:
    draw = torch.Generator("cuda").manual_seed(1)
    table = torch.randn(3000, 512, device="cuda", requires_grad=True)
    ids = torch.randint(3000, (64, 100), generator=draw, device="cuda")
    ids[:, ::3] = 5
    incoming = torch.randn(64, 100, 512, generator=draw, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.autograd.grad(look_up(table, ids), table, incoming)
    with torch.cuda.graph(graph):
        (found,) = torch.autograd.grad(look_up(table, ids), table, incoming)
    ids.add_(1).remainder_(3000)
    for _ in range(3):
        graph.replay()
        (expected,) = torch.autograd.grad(look_up(table, ids), table, incoming)
        assert found.equal(expected)


@pytest.mark.parametrize(
    ("words", "dtype"),
    [(7, torch.float64), *((words, torch.float32) for words in (7, (1 << 15) - 1, 1 << 15))],
    ids=str,
)
def test_a_gradient_is_added_to_what_is_there(words: int, dtype: torch.dtype, device: str) -> None:
    """Of kernels in float32, of torch in float64; what is no word gives nothing, not even a number that is none."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(words, (6, 5), generator=draw)
    ids[:, 0], ids[:, 1] = words - 1, words
    incoming = torch.randint(-9, 9, (6, 5, 130), generator=draw).to(dtype)
    there = torch.randint(-9, 9, (words, 130), generator=draw).to(dtype)
    expected = there.clone().index_put_((ids[ids < words],), incoming[ids < words], accumulate=True)
    incoming[ids == words] = torch.nan
    table = there.to(device)
    add_look_up_gradient(table, incoming.to(device), ids.to(device))
    assert table.cpu().equal(expected)


def test_ids_of_no_word_change_nothing_where_two_bytes_just_do_not_hold_them(device: str) -> None:
    words = 1 << 15
    memory = torch.zeros(2 * words + 1, 2, device=device)
    ids = torch.tensor([1, words, 5, words, 1], device=device)
    embedding.add_gradient(memory[words:-1], torch.ones(5, 2, device=device), ids, words)
    changed = memory.nonzero().tolist()
    assert changed == [[words + row, column] for row in (1, 5) for column in (0, 1)]
    assert memory[[words + 1, words + 5]].tolist() == [[2.0, 2.0], [1.0, 1.0]]
