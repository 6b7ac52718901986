"""The order of transfers: none waits for ever, and each begins as early as it may."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from econmt.parallel.pipeline.plan import (
    Action,
    Like,
    PipelinePart,
    Walk,
    actions_of,
    early,
)


def nothing(*_: Tensor) -> Sequence[Tensor]:
    return ()


def random_parts(seed: int, ranks: int) -> list[PipelinePart]:
    """Parts that read some of those before them."""
    draw = random.Random(seed)
    parts: list[PipelinePart] = []
    for number in range(12):
        count = draw.randint(0, min(3, number))
        read = tuple((place, 0) for place in draw.sample(range(number), count))
        parts.append(PipelinePart(draw.randrange(ranks), nothing, read, (Like((1,), torch.float32),)))
    return parts


def finishes(lists: list[list[Action]]) -> bool:
    """Whether ranks come to their ends where each transfer waits for the other end, pair by pair in order.

    A receipt is begun and not waited for until a part runs: here everything waits, which is harder.
    """
    at = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions) and actions[at[rank]].kind == "run":
                at[rank] += 1
                moved = True
            if at[rank] == len(actions):
                continue
            own = actions[at[rank]]
            other = lists[own.peer]
            there = other[at[own.peer]] if at[own.peer] < len(other) else None
            if there is not None and there.kind != "run" and there.peer == rank:
                assert there.output == own.output
                assert {there.kind, own.kind} == {"send", "receive"}
                at[rank] += 1
                at[own.peer] += 1
                moved = True
    return all(place == len(actions) for place, actions in zip(at, lists, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_no_transfer_waits_for_ever_and_receipts_begin_early(seed: int) -> None:
    """The order between two ranks is kept, and that of all but receipts."""
    ranks = 2 + seed % 3
    parts = random_parts(seed, ranks)
    for backward in (False, True):
        assert finishes([actions_of(parts, rank, backward=backward) for rank in range(ranks)])


@pytest.mark.parametrize("seed", range(20))
def test_receipts_begin_early_and_keep_the_order_between_two_ranks(seed: int) -> None:
    ranks = 2 + seed % 3
    parts = random_parts(seed, ranks)
    for rank in range(ranks):
        before = actions_of(parts, rank)
        after = early(before)
        assert sorted(after) == sorted(before)
        for peer in range(ranks):
            between = [[each for each in actions if each.peer == peer] for actions in (before, after)]
            assert between[0] == between[1]
        others = [[each for each in actions if each.kind != "receive"] for actions in (before, after)]
        assert others[0] == others[1]
        for number, action in enumerate(after):
            if action.kind == "receive" and number:
                assert after[number - 1].peer == action.peer or after[number - 1].kind == "receive"


def test_a_walk_is_the_backward_pass_of_the_whole() -> None:
    torch.manual_seed(2)
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(3, dtype=torch.float64)

    def first() -> Sequence[Tensor]:
        return weight @ inputs, weight.sum(0)

    def second(left: Tensor, right: Tensor) -> Sequence[Tensor]:
        return (torch.tanh(left) * right, left + right)

    def third(left: Tensor, right: Tensor) -> Sequence[Tensor]:
        return (left * (weight @ right),)

    parts = [
        PipelinePart(0, first),
        PipelinePart(0, second, ((0, 0), (0, 1))),
        PipelinePart(0, third, ((1, 0), (0, 0))),
    ]
    a, b = first()
    whole = third(second(a, b)[0], a)[0]
    gradient = torch.randn(3, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(whole, weight, gradient)
    walk = Walk(parts, 0, None, torch.device("cpu"))  # type: ignore[arg-type]  # nothing is exchanged
    (found,) = walk.forward([(2, 0)])
    torch.testing.assert_close(found, whole)
    walk.backward({(2, 0): gradient})
    torch.testing.assert_close(weight.grad, wanted)
