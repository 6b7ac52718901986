"""The division of layers over ranks is the best of all by its own model."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from econmt.parallel.pipeline.partition import Division, Link, Piece, divide


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


def test_what_is_done_once_does_not_push_layers_up() -> None:
    """What a stage spares at the end the one above it would need then."""
    pieces = [Piece(f"layer {number}", 1.0, 0.1, 1.0, 100.0) for number in range(8)]
    assert divide(pieces, 2, 70, Link(0.0, 0.0)).homes == (0, 0, 0, 0, 1, 1, 1, 1)


def test_a_slow_link_leaves_all_on_one_rank() -> None:
    pieces = [Piece(f"layer {number}", 1.0, 0.1, 1.0) for number in range(4)]
    assert divide(pieces, 2, 10, Link(1000.0, 0.0)) == Division((0, 0, 0, 0), 1, 40.4, 40.4)


def test_a_long_layer_has_a_rank_for_itself() -> None:
    pieces = [Piece("long", 3.0, 0.0, 0.0), *(Piece(str(number), 1.0, 0.0, 0.0) for number in range(3))]
    assert divide(pieces, 2, 16, Link(0.0, 0.0)).homes == (0, 1, 1, 1)
