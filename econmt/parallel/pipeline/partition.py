"""Division of a pipeline: layers of each rank and chunks of time, with the least cost by a model.

Of K chunks and stages whose chunk takes t_1 ... t_S seconds (forward and backward, what it sends included), the first
chunk passes all stages and the others follow at the pace of the slowest: t_1 + ... + t_S + (K - 1) max t. A layer takes
a time for every step and a time for every chunk (launching it, beginning its products anew), so that more chunks fill
the stages sooner and cost more by themselves. What waits for the last chunk, the gradients of weights, comes after all
of that on the first stage, which is the last to end. The others make theirs while they would wait: for half the time in
which a chunk passes the stages below, the way back, and for as long as the first stage makes its own. What they take
beyond that is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """A layer, or anything that cannot be divided further.

    Attributes:
        name: for a person.
        step: seconds of a time step, forward and backward.
        chunk: seconds that each chunk takes however short it is.
        values: bytes of a time step that go to the next layer; as many come back as a gradient.
        once: seconds after all chunks.
    """

    name: str
    step: float
    chunk: float
    values: float
    once: float = 0.0


class Link(NamedTuple):
    """Between two ranks: seconds that a transfer takes however small it is, and seconds a byte."""

    latency: float
    byte: float

    def seconds(self, size: float) -> float:
        """Returns the seconds of a transfer of ``size`` bytes."""
        return self.latency + self.byte * size


class Division(NamedTuple):
    """Division of layers over stages.

    Attributes:
        homes: of each piece its stage, rising.
        chunks: into how many time is cut.
        seconds: that the model predicts for all of it.
        alone: the same on one rank.
    """

    homes: tuple[int, ...]
    chunks: int
    seconds: float
    alone: float

    def text(self, pieces: Sequence[Piece]) -> str:
        """For the log: which pieces each stage has."""
        of_stages: dict[int, list[str]] = {}
        for piece, home in zip(pieces, self.homes, strict=True):
            of_stages.setdefault(home, []).append(piece.name)
        parts = [
            f"{names[0]} to {names[-1]} on rank {home}" if len(names) > 1 else f"{names[0]} on rank {home}"
            for home, names in of_stages.items()
        ]
        return f"{', '.join(parts)}, time in {self.chunks} chunks"


def divide(pieces: Sequence[Piece], stages: int, steps: int, link: Link) -> Division:
    """The division of neighbouring pieces over at most so many stages that the model says is fastest.

    It is exact: for each number of chunks, and each time that a slowest stage can have, the cuts with the least sum.

    Args:
        pieces: in the order in which they run.
        stages: ranks. steps: time steps. link: between neighbours.
    """
    alone = sum(piece.step * steps + piece.chunk + piece.once for piece in pieces)
    best = Division((0,) * len(pieces), 1, alone, alone)
    for length in sorted({math.ceil(steps / chunks) for chunks in range(1, steps + 1)}, reverse=True):
        chunks = math.ceil(steps / length)
        costs = _costs(pieces, length, link)
        for slowest in sorted({cost for row in costs for cost in row if cost > 0.0}):
            least = sum(piece.step * length + piece.chunk for piece in pieces)
            if least + (chunks - 1) * slowest >= best.seconds:
                break
            found = _cuts(costs, pieces, length, stages, slowest)
            if found is not None and found[0] + (chunks - 1) * slowest < best.seconds:
                best = Division(found[1], chunks, found[0] + (chunks - 1) * slowest, alone)
    return best


def _costs(pieces: Sequence[Piece], length: int, link: Link) -> list[list[float]]:
    """[begin][end]: seconds of a chunk on a stage with pieces begin to end, what it sends on and back included."""
    count = len(pieces)
    costs = [[0.0] * (count + 1) for _ in range(count)]
    for begin in range(count):
        work = 0.0
        for end in range(begin + 1, count + 1):
            piece = pieces[end - 1]
            work += piece.step * length + piece.chunk
            sent = 2.0 * link.seconds(piece.values * length) if end < count else 0.0
            costs[begin][end] = work + sent
    return costs


def _cuts(
    costs: Sequence[Sequence[float]], pieces: Sequence[Piece], length: int, stages: int, slowest: float
) -> tuple[float, tuple[int, ...]] | None:
    """Cuts into at most so many stages, none slower than ``slowest``, with the least sum of times and what is added."""
    count = len(costs)
    passed, once = [0.0], [0.0]
    for piece in pieces:
        passed.append(passed[-1] + piece.step * length + piece.chunk)
        once.append(once[-1] + piece.once)
    whole: tuple[float, tuple[int, ...]] | None = None
    for first in range(1, count + 1):
        if costs[0][first] > slowest:
            continue
        # After each stage: by pieces placed, the least sum and the homes of these.
        reached: list[tuple[float, tuple[int, ...]] | None] = [None] * (count + 1)
        reached[first] = costs[0][first] + once[first], (0,) * first
        for stage in range(1, stages + 1):
            last = reached[count]
            if last is not None and (whole is None or last[0] < whole[0]):
                whole = last
            if stage == stages:
                break
            following: list[tuple[float, tuple[int, ...]] | None] = [None] * (count + 1)
            for begin in range(first, count):
                before = reached[begin]
                if before is None:
                    continue
                for end in range(begin + 1, count + 1):
                    if costs[begin][end] > slowest:
                        continue
                    beyond = max(0.0, once[end] - once[begin] - once[first] - passed[begin] / 2.0)
                    cost = before[0] + costs[begin][end] + beyond
                    there = following[end]
                    if there is None or cost < there[0]:
                        following[end] = cost, (*before[1], *[stage] * (end - begin))
            reached = following
    return whole
