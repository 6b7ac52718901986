"""The division of layers over ranks is the best by its own model; the order of transfers waits for nobody."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from econmt.engine.precision import Precision
from econmt.model import Implementations
from econmt.parallel.pipeline.costs import plan_pipeline
from econmt.parallel.pipeline.model_parts import divided
from econmt.parallel.pipeline.partition import Link, Piece, PipelinePlan, divide
from econmt.parallel.pipeline.plan import Action, Like, PipelinePart, actions_of, early
from econmt.tasks.protocol import Shape, Task
from tests.unit.parallel.pipeline_checks import PLAIN, language_model_task, translation_task


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


def seconds(pieces: list[Piece], homes: tuple[int, ...], steps: int, length: int, link: Link) -> float:
    """What a division takes, added up from its description."""
    chunks = math.ceil(steps / length)
    times, after, passed = [], [], 0.0
    first = sum(piece.once for piece, home in zip(pieces, homes, strict=True) if home == 0)
    for stage in range(max(homes) + 1):
        own = [number for number, home in enumerate(homes) if home == stage]
        time = sum(pieces[number].step * length + pieces[number].chunk for number in own)
        added = first if stage == 0 else max(0.0, sum(pieces[each].once for each in own) - first - passed / 2)
        passed += time
        if own[-1] + 1 < len(pieces):
            time += 2 * (link.latency + link.byte * pieces[own[-1]].values * length)
        times.append(time)
        after.append(added)
    return sum(times) + (chunks - 1) * max(times) + sum(after)


def all_homes(count: int, stages: int) -> list[tuple[int, ...]]:
    """Every way to cut pieces into one to so many stages."""
    found = []
    for number in range(1, stages + 1):
        for cuts in itertools.combinations(range(1, count), number - 1):
            ends = (*cuts, count)
            found.append(tuple(sum(piece >= end for end in ends) for piece in range(count)))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    count, stages, steps = draw.randint(1, 6), draw.randint(1, 4), draw.randint(1, 12)
    bounds = ((0.1, 2.0), (0.0, 1.0), (0.0, 5.0), (0.0, 2.0))
    pieces = [Piece(str(number), *(draw.uniform(*each) for each in bounds)) for number in range(count)]
    link = Link(draw.uniform(0.0, 0.5), draw.uniform(0.0, 0.1))
    wanted = min(
        seconds(pieces, homes, steps, length, link)
        for homes in all_homes(count, stages)
        for length in range(1, steps + 1)
    )
    found = divide(pieces, stages, steps, link)
    length = math.ceil(steps / found.chunks)
    assert found.seconds == pytest.approx(wanted)
    assert seconds(pieces, found.homes, steps, length, link) == pytest.approx(found.seconds)
    assert found.alone == pytest.approx(seconds(pieces, (0,) * count, steps, steps, link))


def test_equal_layers_are_divided_equally() -> None:
    pieces = [Piece(f"layer {number}", 1.0, 0.1, 1.0) for number in range(8)]
    found = divide(pieces, 4, 35, Link(0.0, 0.0))
    assert found.homes == (0, 0, 1, 1, 2, 2, 3, 3)
    assert found.alone / found.seconds > 3.0
    assert found.text(pieces).startswith("layer 0 to layer 1 on rank 0, layer 2 to layer 3 on rank 1")


FREE = Link(0.0, 0.0)
"""What a transfer takes."""


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (language_model_task("model.weight_tying=softmax"), "e: layer 0"),
        (translation_task(*PLAIN, "model.encoder.bidirectional=bottom"), "decoder: layer 0"),
        (translation_task("model.encoder={layers: 3, size: 8, bidirectional: none, rank: 2}"), "feeding"),
    ],
)
def test_every_parameter_has_a_home(task: Task, told: str) -> None:
    model, how = task.build_model().train(), Implementations.everywhere("reference")
    plan = plan_pipeline(model, 2, Shape(4, 16, 16), FREE, Precision(), how)
    assert PipelinePlan(*json.loads(json.dumps(plan))) == plan
    assert told in plan.note
    homes = divided(model, plan).homes
    assert homes.keys() == dict(model.named_parameters()).keys()
    assert set(homes.values()) <= {-1, 0, 1}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_that_cost_what_they_do_here_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([16.0, 2.0, 17.0])
    monkeypatch.setattr("econmt.parallel.pipeline.costs.shortest_seconds", lambda *_: next(times))
    model = language_model_task("model.embedding=6").build_model()
    how = Implementations.everywhere("reference")
    plan = plan_pipeline(model, 4, Shape(4, 1, 16), FREE, Precision(), how)
    assert plan.homes == [[0, 0, 1, 1, 2, 2, 3, 3]]
    assert plan.chunks == [16]
    # 8 layers of 16 steps and 1 s for their weights; 16 chunks over four stages of two, and those of the first.
    assert f"{8 * 17 / (8 + 15 * 2 + 2):.2f} times as fast as on one rank" in plan.note
