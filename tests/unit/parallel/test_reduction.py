"""Reduction of sparse gradients between ranks that are simulated in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from econmt.parallel.reduction import BucketedReduction


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
