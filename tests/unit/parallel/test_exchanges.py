"""Sums of gradients and shares of parameters among ranks, which are threads here, against plain sums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from econmt.parallel import reduction
from econmt.parallel.groups import Group
from econmt.parallel.reduction import BucketedReduction, in_buckets
from econmt.parallel.sharding import OptimizerShares
from tests.conftest import PATIENCE

Result = TypeVar("Result")


class Room:
    """What threads exchange: the n-th call of each meets the n-th calls of the others."""

    def __init__(self, size: int) -> None:
        self.size, self.brought = size, dict[int, dict[int, Tensor]]()
        self.condition = threading.Condition()

    def meet(self, call: int, rank: int, tensor: Tensor) -> list[Tensor]:
        with self.condition:
            self.brought.setdefault(call, {})[rank] = tensor.clone()
            self.condition.notify_all()
            assert self.condition.wait_for(lambda: len(self.brought[call]) == self.size, PATIENCE)
            return [self.brought[call][each] for each in range(self.size)]


class Threads(Group):
    """A rank's group; what it starts is done when it is waited for, after the tensor has been read at once."""

    def __init__(self, room: Room, rank: int) -> None:
        super().__init__(room.size, None)
        self._room, self._rank, self._calls = room, rank, 0

    def _started(self, tensor: Tensor, then: Callable[[list[Tensor]], Any]) -> Any:
        self._calls += 1
        call, room = self._calls, self._room
        with room.condition:
            room.brought.setdefault(call, {})[self._rank] = tensor.clone()
            room.condition.notify_all()
        return SimpleNamespace(wait=lambda: then(room.meet(call, self._rank, tensor)))

    def all_reduce(self, tensor: Tensor) -> Any:
        return self._started(tensor, lambda all_: tensor.copy_(torch.stack(all_).sum(0)))

    def broadcast(self, tensor: Tensor, rank: int) -> Any:
        return self._started(tensor, lambda all_: tensor.copy_(all_[rank]))

    def gather(self, tensor: Tensor) -> Any:
        return self._started(tensor, torch.stack)


def on_ranks(size: int, job: Callable[[int, Threads], Result]) -> list[Result]:
    """What a job returns on each rank; an error of one is raised."""
    room, results, errors = Room(size), dict[int, Result](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = job(rank, Threads(room, rank))
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


ALONE = threading.Lock()
"""Held by the thread that draws weights."""


class Small(nn.Module):
    """Tables with sparse gradients, matrices, a frozen one, and one that gets a gradient on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        with ALONE:
            torch.manual_seed(1)
            self.few, self.many = nn.Embedding(40, 5, sparse=True), nn.Embedding(4, 5, sparse=True)
            self.dense, self.frozen, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 40, (3 + seed % 2,), generator=draw)
        rows = self.few(ids) + self.many(ids % 4)
        return (self.last(self.frozen(self.dense(rows).tanh())) * (seed + 1)).square().sum()


def dense_gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad.to_dense() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bucket", [1, 150, 1 << 20])
@pytest.mark.parametrize("how", ["while", "packed", "after"])
def test_gradients_are_summed_in_every_step(
    monkeypatch: pytest.MonkeyPatch, ranks: int, bucket: int, how: str
) -> None:
    """Sent while the backward pass runs, packed before, or after it; a step that is given up leaves nothing."""
    monkeypatch.setattr(reduction, "BUCKET_BYTES", bucket)

    def job(rank: int, group: Threads) -> list[tuple[list[Tensor], float]]:
        model = Small()
        sums = BucketedReduction(model.parameters(), group, torch.float32)
        found = []
        for step in range(3):
            model.zero_grad()
            if step == 1:  # every rank gives up before it sends anything
                model(5).backward()
                sums.pack()
                sums.abandon()
                model(9).backward()
                model.zero_grad()
            if how == "while":
                sums.begin()
            loss = model(7 * step + rank)
            loss.backward()
            if how == "packed":
                sums.pack()
            total = loss.detach()
            sums.finish(total)
            found.append((dense_gradients(model), float(total)))
        return found

    results = on_ranks(ranks, job)
    for step in range(3):
        expected, losses = list[list[Tensor]](), []
        for rank in range(ranks):
            model = Small()
            loss = model(7 * step + rank)
            loss.backward()
            expected.append(dense_gradients(model))
            losses.append(float(loss.detach()))
        for gradients, total in (each[step] for each in results):
            assert total == pytest.approx(sum(losses), rel=1e-6)
            assert len(gradients) == 5
            for gradient, parts in zip(gradients, zip(*expected, strict=True), strict=True):
                torch.testing.assert_close(gradient, torch.stack(parts).sum(0), rtol=1e-5, atol=1e-5)
        first = results[0][step][0]
        assert all(all(map(torch.equal, first, other[step][0])) for other in results), (
            "the same bits on each rank"
        )


def test_gradients_travel_in_sixteen_bits() -> None:
    def job(rank: int, group: Threads) -> Tensor:
        layer = nn.Linear(3, 2, bias=False)
        layer.weight.grad = torch.full((2, 3), 1.0 + (rank + 1) / 512)
        BucketedReduction(layer.parameters(), group, torch.bfloat16).finish(torch.zeros(()))
        assert layer.weight.grad.dtype == torch.float32
        return layer.weight.grad

    # 1 + 1/512 and 1 + 2/512 are rounded to 1 and 1, or to even, before they are added.
    expected = sum(torch.tensor(1.0 + (rank + 1) / 512).bfloat16() for rank in range(2))
    for found in on_ranks(2, job):
        assert torch.equal(found, expected.float().expand(2, 3))


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([], []),
        ([10], [[10]]),
        ([11], [[11]]),
        ([4, 6, 1], [[4, 6], [1]]),
        ([4, 7], [[4], [7]]),
        ([12, 3, 3, 4, 1], [[12], [3, 3, 4], [1]]),
        ([3, 12, 3], [[3], [12], [3]]),
    ],
)
def test_buckets_are_as_full_as_they_may_be(
    monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int], buckets: list[list[int]]
) -> None:
    """In order, and one that is too large alone."""
    monkeypatch.setattr(reduction, "BUCKET_BYTES", 40)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    found = in_buckets(parameters)
    assert [[each.numel() for each in bucket] for bucket in found] == buckets
    assert [each for bucket in found for each in bucket] == parameters


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("bucket", [1, 60, 1 << 20])
def test_every_rank_has_what_owners_made(monkeypatch: pytest.MonkeyPatch, ranks: int, bucket: int) -> None:
    """Twice; ranks may own nothing, and frozen parameters have no owner."""
    monkeypatch.setattr(reduction, "BUCKET_BYTES", bucket)

    def job(rank: int, group: Threads) -> tuple[list[Tensor], list[int]]:
        model = Small()
        parameters = list(model.parameters())
        parts = OptimizerShares(parameters, rank, group)
        owned = [number for number, each in enumerate(parameters) if any(each is own for own in parts.owned)]
        for step in range(2):
            with torch.no_grad():
                for number, each in enumerate(parameters):
                    each.fill_(100 * step + 10 * rank + number if number in owned else -1.0)
            parts.spread()
        return [each.detach() for each in parameters], owned

    results = on_ranks(ranks, job)
    owners = {number: rank for rank, (_, owned) in enumerate(results) for number in owned}
    frozen = {number for number, each in enumerate(Small().parameters()) if not each.requires_grad}
    assert sorted(owners) == sorted(set(range(7)) - frozen)
    assert sum(len(owned) for _, owned in results) == len(owners)
    for parameters, _ in results:
        for number, each in enumerate(parameters):
            expected = 100 + 10 * owners[number] + number if number in owners else -1.0
            assert torch.equal(each, torch.full_like(each, expected)), number


@pytest.mark.parametrize(("ids", "travels"), [([1, 1, 4], "gather"), ([0, 1, 2, 3, 4, 5], "all_reduce")])
def test_rows_travel_where_they_are_fewer_in_every_step(
    monkeypatch: pytest.MonkeyPatch, ids: list[int], travels: str
) -> None:
    """As rows or as a table; a later step sends no more than the first."""
    sent: list[str] = []

    def noting(name: str) -> Callable[[Threads, Tensor], Any]:
        real = getattr(Threads, name)

        def noted(group: Threads, tensor: Tensor) -> Any:
            sent.extend([name] * (group._rank == 0 and tensor.is_floating_point() and tensor.numel() > 1))
            return real(group, tensor)

        return noted

    for name in ("gather", "all_reduce"):
        monkeypatch.setattr(Threads, name, noting(name))

    def job(rank: int, group: Threads) -> Tensor:
        table = nn.Embedding(6, 2, sparse=True)
        sums = BucketedReduction([table.weight], group, torch.float32)
        for _ in range(3):
            table.weight.grad = None
            sums.begin()
            table(torch.tensor(ids)).sum().backward()
            sums.finish(torch.ones(()))
        return table.weight.grad.to_dense()

    for found in on_ranks(2, job):
        assert torch.equal(found, 2.0 * torch.bincount(torch.tensor(ids), minlength=6)[:, None].expand(6, 2))
    assert sent == [travels] * 3
