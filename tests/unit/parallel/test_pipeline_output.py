"""The output layer divided by vocabulary is that of all of it; sparse gradients are summed over ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from econmt.parallel.pipeline import output
from econmt.parallel.pipeline.output import Slice, VocabularyShares, split_cross_entropy
from econmt.parallel.pipeline.stages import even_rows
from econmt.parallel.reduction import BucketedReduction
from econmt_ops import linear_cross_entropy
from tests.conftest import PATIENCE

PAD = 0


class Exchange:
    """What threads that stand for ranks give each other, when they wait for it."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size

    def gather(self, rank: int, tensor: Tensor) -> SimpleNamespace:
        return SimpleNamespace(wait=partial(self._meet, rank, tensor.clone()))

    def _meet(self, rank: int, tensor: Tensor) -> Tensor:
        self._given[rank] = tensor
        self._barrier.wait(PATIENCE)
        found = torch.stack(self._given)
        self._barrier.wait(PATIENCE)
        return found


def shares_of(
    size: int, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float, scale: Tensor
) -> list[VocabularyShares]:
    """What each of so many ranks makes."""
    exchange = Exchange(size)

    def rank(number: int) -> VocabularyShares:
        rows = even_rows(len(weight), size, number)
        layer = Slice(weight[rows], bias[rows], rows.start, len(weight), -(-len(weight) // size))
        settings: Any = {"scale": scale, "label_smoothing": smoothing, "ignore_index": PAD}
        return split_cross_entropy(hidden, targets, layer, partial(exchange.gather, number), **settings)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shares_add_up_to_the_whole(size: int, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "CHUNK_BYTES", 64)
    torch.manual_seed(1)
    rows, width, vocabulary = 13, 4, 11
    sizes = ((rows, width), (vocabulary, width), (vocabulary,))
    hidden, weight, bias = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[3] = PAD
    settings: Any = {"label_smoothing": smoothing, "ignore_index": PAD, "reduction": "sum"}
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, implementation="reference", **settings)
    wanted = torch.autograd.grad(0.3 * loss, [hidden, weight, bias])
    scale = torch.tensor(0.3, dtype=torch.float64)
    found = shares_of(size, hidden.detach(), weight.detach(), bias.detach(), targets, smoothing, scale)
    for each in found:
        torch.testing.assert_close(each.loss, loss.detach())
    torch.testing.assert_close(sum(each.hidden for each in found), wanted[0])
    torch.testing.assert_close(torch.cat([each.weight for each in found]), wanted[1])
    torch.testing.assert_close(torch.cat([each.bias for each in found]), wanted[2])


def test_what_is_made_of_16_bit_logits_is_not_rounded_to_16_bits() -> None:
    """As in one process: the loss, and a gradient that is rounded once."""
    torch.manual_seed(1)
    hidden = torch.randn(24, 8).bfloat16()
    weight, bias, targets = torch.randn(40, 8), torch.randn(40), torch.randint(1, 40, (24,))
    rounded = [part.bfloat16().float() for part in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*rounded).bfloat16().double()
    wanted = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    first, second = shares_of(2, hidden, weight, bias, targets, 0.0, torch.tensor(1.0))
    assert float(first.loss) == pytest.approx(float(wanted), rel=1e-6)
    probabilities = logits.softmax(1) - torch.nn.functional.one_hot(targets, 40)
    found = torch.cat([first.bias, second.bias])
    torch.testing.assert_close(found, probabilities.sum(0).float(), rtol=1e-5, atol=1e-5)


def test_a_batch_of_padding_has_no_loss() -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    (found,) = shares_of(1, hidden, weight, torch.randn(5), torch.full((3,), PAD), 0.1, torch.tensor(1.0))
    assert float(found.loss) == 0.0
    assert not found.hidden.any()
    assert not found.weight.any()
    assert not found.bias.any()


class Twin:
    """The group of this rank and another one that holds the same values."""

    size = 2

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        yield

    def all_reduce(self, tensor: Tensor) -> SimpleNamespace:
        self.calls.append(("all_reduce", tuple(tensor.shape)))
        tensor *= 2
        return SimpleNamespace(wait=lambda: None)

    def broadcast(self, tensor: Tensor, rank: int) -> SimpleNamespace:
        raise AssertionError("nothing is broadcast")

    def gather(self, tensor: Tensor) -> SimpleNamespace:
        self.calls.append(("gather", tuple(tensor.shape)))
        return SimpleNamespace(wait=lambda: torch.stack([tensor, tensor]))

    def counts(self, own: list[int]) -> list[list[int]]:
        self.calls.append(("counts", tuple(own)))
        return [own, own]


def reduced(table: nn.Embedding, ids: list[int], reduction: BucketedReduction) -> Tensor:
    """The gradient of a table after a step over ids, summed over two equal ranks."""
    table.weight.grad = None
    reduction.abandon()
    reduction.begin()
    table(torch.tensor(ids)).sum().backward()
    reduction.finish(torch.ones(()))
    return table.weight.grad.to_dense()


@pytest.mark.parametrize(("ids", "travels"), [([1, 1, 4], "gather"), ([0, 1, 2, 3, 4, 5], "all_reduce")])
def test_sparse_gradients_are_summed_as_rows_or_as_a_table(ids: list[int], travels: str) -> None:
    table, ranks = nn.Embedding(6, 2, sparse=True), Twin()
    reduction = BucketedReduction([table.weight], ranks, torch.float32)
    found = reduced(table, ids, reduction)
    expected = 2.0 * torch.bincount(torch.tensor(ids), minlength=6)[:, None].expand(6, 2)
    assert torch.equal(found, expected)
    assert travels in [name for name, shape in ranks.calls if shape != () and name != "counts"]


def test_every_step_sends_as_much_as_the_first() -> None:
    table, ranks = nn.Embedding(6, 2, sparse=True), Twin()
    reduction = BucketedReduction([table.weight], ranks, torch.float32)
    sent = []
    for _ in range(3):
        ranks.calls.clear()
        found = reduced(table, [2, 5], reduction)
        assert found.sum() == 8.0
        sent.append(list(ranks.calls))
    assert sent[0] == sent[1] == sent[2]
    assert ("counts", (2,)) in sent[0]
