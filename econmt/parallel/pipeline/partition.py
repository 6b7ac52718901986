"""Divides the layers of a pipeline among ranks and cuts time into chunks so that a cost model's time is least.

With K chunks and stages that take t_1 ... t_S seconds for a chunk (forward, backward and transfers), the first chunk
passes through all stages and the others follow at the pace of the slowest: t_1 + ... + t_S + (K - 1) max t. A layer has
a cost per time step and a cost per chunk (launches, setting up products), so that more chunks fill the pipeline sooner
but cost more in total. Gradients of weights, which need all chunks, are computed at the end; the first stage finishes
last, so its time is added in full. The others compute theirs while they would be idle: for half the time in which a
chunk passes through the stages below (the backward pass), and while the first stage computes its own. Time beyond that
is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations
from typing import NamedTuple


class Piece(NamedTuple):
    """Cost of a layer, or of another part that cannot be divided further.

    Attributes:
        step: Seconds per time step, forward and backward.
        chunk: Seconds per chunk, independent of its length.
        values: Bytes per time step sent to the next layer; the gradient has the same size.
        once: Seconds after all chunks.
    """

    name: str
    step: float
    chunk: float
    values: float
    once: float = 0.0


class Link(NamedTuple):
    """Link between two ranks: latency in seconds, and seconds per byte."""

    latency: float
    byte: float

    def seconds(self, size: float) -> float:
        """Returns the seconds of a transfer of ``size`` bytes."""
        return self.latency + self.byte * size


class Division(NamedTuple):
    """Assignment of layers to pipeline stages.

    Attributes:
        homes: Stage of each layer, ascending.
        chunks: Number of chunks that time is cut into.
        alone: Predicted seconds on one rank.
    """

    homes: tuple[int, ...]
    chunks: int
    seconds: float
    alone: float

    def text(self, pieces: Sequence[Piece]) -> str:
        """Returns a text for the log: the layers of each stage."""
        of_stages: dict[int, list[str]] = {}
        for piece, home in zip(pieces, self.homes, strict=True):
            of_stages.setdefault(home, []).append(piece.name)
        parts = [
            f"{names[0]} to {names[-1]} on rank {home}" if len(names) > 1 else f"{names[0]} on rank {home}"
            for home, names in of_stages.items()
        ]
        return f"{', '.join(parts)}, time in {self.chunks} chunks"


class PipelinePlan(NamedTuple):
    """Division of a model over pipeline stages, which a run saves in its state.

    Attributes:
        homes: Stages of the layers, bottom first and ascending: those of a language model; or, of a translation model,
            those of the encoder's bidirectional layers (two each, one for each direction), of its other layers and of
            the decoder's layers, which are equal with input feeding.
        chunks: Number of chunks of the text, or of each side.
    """

    homes: list[list[int]]
    chunks: list[int]
    note: str


def divide(pieces: Sequence[Piece], stages: int, steps: int, link: Link) -> Division:
    """Finds the assignment of consecutive layers to at most ``stages`` ranks that is predicted to be fastest.

    The search is exact: for each number of chunks and each possible time of the slowest stage, it finds the cuts with
    the least sum.
    """
    alone = sum(piece.step * steps + piece.chunk + piece.once for piece in pieces)
    once = [0.0, *accumulate(piece.once for piece in pieces)]
    best = Division((0,) * len(pieces), 1, alone, alone)
    for length in sorted({math.ceil(steps / chunks) for chunks in range(1, steps + 1)}, reverse=True):
        chunks = math.ceil(steps / length)
        passed = [0.0, *accumulate(piece.step * length + piece.chunk for piece in pieces)]
        sent = [2.0 * link.seconds(piece.values * length) for piece in pieces[:-1]]
        # Seconds per chunk on a stage with layers begin to end, transfers included.
        costs = {
            (begin, end): passed[end] - passed[begin] + (sent[end - 1] if end < len(pieces) else 0.0)
            for begin, end in combinations(range(len(pieces) + 1), 2)
        }
        for slowest in sorted({*costs.values()}):
            if passed[-1] + (chunks - 1) * slowest >= best.seconds:
                break
            cuts = _cuts(costs, passed, once, stages, slowest)
            if cuts is not None and cuts[0] + (chunks - 1) * slowest < best.seconds:
                best = Division(cuts[1], chunks, cuts[0] + (chunks - 1) * slowest, alone)
    return best


def _cuts(
    costs: Mapping[tuple[int, int], float],
    passed: Sequence[float],
    once: Sequence[float],
    stages: int,
    slowest: float,
) -> tuple[float, tuple[int, ...]] | None:
    """Finds cuts into at most ``stages`` stages, none slower than ``slowest``, with the least total time.

    ``passed`` and ``once`` are seconds of the layers before each cut, for a chunk and after all chunks.
    """
    count = len(passed) - 1
    best: tuple[float, tuple[int, ...]] | None = None
    for first in range(1, count + 1):
        if costs[0, first] > slowest:
            continue
        # After each stage: the least sum and the stages of the layers placed, by number of layers placed.
        reached: list[tuple[float, tuple[int, ...]] | None] = [None] * (count + 1)
        reached[first] = costs[0, first] + once[first], (0,) * first
        for stage in range(1, stages + 1):
            last = reached[count]
            if last is not None and (best is None or last[0] < best[0]):
                best = last
            if stage == stages:
                break
            following: list[tuple[float, tuple[int, ...]] | None] = [None] * (count + 1)
            for begin in range(first, count):
                before = reached[begin]
                if before is None:
                    continue
                for end in range(begin + 1, count + 1):
                    if costs[begin, end] > slowest:
                        continue
                    exposed = max(0.0, once[end] - once[begin] - once[first] - passed[begin] / 2.0)
                    cost = before[0] + costs[begin, end] + exposed
                    known = following[end]
                    if known is None or cost < known[0]:
                        following[end] = cost, (*before[1], *[stage] * (end - begin))
            reached = following
    return best
