"""Predicts the time of an update on many ranks from times measured on a few.

The model has three parts. An update of n rows takes a time interpolated between numbers of rows that were timed while
all ranks of a host computed. Replicas add the all-reduce of the gradients, a ring within each host (Patarasuk and Yuan,
2009) and a ring or a binary tree over the hosts, whichever is faster; the backward pass hides a part of it where
devices exchange while they compute. Stages of a pipeline replace the time of the recurrent layers by that of
:func:`econmt.parallel.pipeline.partition.divide`, which also chooses the division of training, and share the output
layer and the optimizer.

Assumptions: all ranks are alike, chunks are equally long, no link is shared, nobody waits for data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, log2
from typing import Literal, NamedTuple

from econmt.parallel.pipeline.partition import Link, Piece, divide
from econmt.parallel.reduction import BUCKET_BYTES

Kind = Literal["data", "pipeline", "both"]
KINDS: tuple[Kind, ...] = ("data", "pipeline", "both")

HIDDEN_SHARE = 0.5
"""Share of an update in which gradients can travel behind the backward pass."""


class Stack(NamedTuple):
    """Recurrent layers that a pipeline divides, with ``steps`` time steps of a row.

    ``pieces`` are their times at the profile's largest number of rows, bottom first.
    """

    pieces: Sequence[Piece]
    steps: int


class StepProfile(NamedTuple):
    """Measured times of one rank's update.

    Attributes:
        alone: Seconds of an update of the largest number of rows while no other rank computes.
        rows: Numbers of rows, rising.
        seconds: Seconds of an update of each while all ranks of a host compute.
        shared: Seconds of the output layer and the optimizer at the largest number of rows, which the stages of a
            pipeline share.
        gradient_bytes: Bytes of the gradients that replicas add up.
    """

    alone: float
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    shared: float
    gradient_bytes: float
    stacks: tuple[Stack, ...]

    def update(self, rows: float) -> float:
        """Returns the seconds of an update of so many rows while a host's ranks all compute.

        Between two numbers of rows that were timed, and beyond the largest, it is linear; below the smallest, constant.
        """
        if rows <= self.rows[0] or len(self.rows) == 1:
            return self.seconds[0] * max(1.0, rows / self.rows[0])
        points = list(zip(self.rows, self.seconds, strict=True))
        below, above = next((pair for pair in pairwise(points) if rows <= pair[1][0]), points[-2:])
        slope = (above[1] - below[1]) / (above[0] - below[0])
        return max(below[1], below[1] + slope * (rows - below[0]))


class Network(NamedTuple):
    """The ranks and the links between them.

    Attributes:
        within, between: Links between ranks of a host, and between hosts.
        overlaps: True if a rank computes while its gradients travel, as a GPU does.
    """

    ranks_per_host: int
    within: Link
    between: Link
    overlaps: bool

    def all_reduce(self, size: float, ranks: int, apart: int = 1) -> float:
        """Returns the seconds of an all-reduce of ``size`` bytes of each rank.

        Ranks that take part are ``apart`` in the order of all ranks; the stages of a pipeline are neighbours.
        """
        local = max(1, min(ranks, self.ranks_per_host // apart))
        hosts = ceil(ranks / local)
        between = min(_ring(self.between, size / local, hosts), _tree(self.between, size / local, hosts))
        return _ring(self.within, size, local) + between


def _ring(link: Link, size: float, ranks: int) -> float:
    return 2 * (ranks - 1) * link.seconds(size / ranks)


def _tree(link: Link, size: float, ranks: int) -> float:
    return 2 * (ceil(log2(ranks)) * link.latency + (ranks > 1) * link.byte * size)


class Prediction(NamedTuple):
    """A predicted update.

    Attributes:
        replicas: Copies of the model, each with a share of the rows.
        stages: Ranks of each copy.
        exchange: Seconds of it in which gradients travel and nothing else happens.
        chunks: Chunks of time of each stack.
        sent: Bytes that a rank sends.
    """

    replicas: int
    stages: int
    seconds: float
    exchange: float
    chunks: tuple[int, ...]
    sent: float


def predict(profile: StepProfile, network: Network, replicas: int, stages: int, rows: int) -> Prediction:
    """Predicts an update of ``rows`` rows in all, at least one for each replica."""
    ranks = replicas * stages
    share = ceil(rows / replicas)
    seconds = profile.update(share)
    crowd = max(1.0, profile.seconds[-1] / profile.alone)
    busy = min(ranks, network.ranks_per_host)
    most = max(2, network.ranks_per_host)
    seconds *= (1.0 + (crowd - 1.0) * (busy - 1) / (most - 1)) / crowd
    scale = seconds / profile.update(profile.rows[-1])
    chunks: tuple[int, ...] = ()
    sent = 0.0
    if stages > 1:
        link = network.within if stages <= network.ranks_per_host else network.between
        for stack in profile.stacks:
            pieces = [_scaled(piece, scale, share / profile.rows[-1]) for piece in stack.pieces]
            division = divide(pieces, stages, stack.steps, link)
            seconds += division.seconds - division.alone
            chunks = (*chunks, division.chunks)
            sent += 2.0 * max(piece.values for piece in pieces) * stack.steps
        seconds -= profile.shared * scale * (1.0 - 1.0 / stages)
    exposed = 0.0
    if replicas > 1:
        size = profile.gradient_bytes / stages
        travel = network.all_reduce(size, replicas, stages)
        last = travel * min(1.0, BUCKET_BYTES / size)
        exposed = max(last, travel - HIDDEN_SHARE * seconds) if network.overlaps else travel
        sent += 2.0 * (replicas - 1) / replicas * size
    return Prediction(replicas, stages, seconds + exposed, exposed, chunks, sent)


def _scaled(piece: Piece, scale: float, rows: float) -> Piece:
    """Returns a layer with all its times times ``scale``, and its transfers times ``rows``."""
    return piece._replace(
        step=piece.step * scale,
        chunk=piece.chunk * scale,
        once=piece.once * scale,
        values=piece.values * rows,
    )


def best(profile: StepProfile, network: Network, ranks: int, kind: Kind, rows: int) -> Prediction | None:
    """Returns the fastest prediction of a kind of division, or None if there is none.

    There is none if there are more replicas than rows, or more stages than layers.
    """
    longest = max((len(stack.pieces) for stack in profile.stacks), default=1)
    predictions = [
        predict(profile, network, replicas, stages, rows)
        for replicas, stages in divisions(ranks, kind, longest)
        if replicas <= rows
    ]
    return min(predictions, key=lambda each: each.seconds, default=None)


def divisions(ranks: int, kind: Kind, longest: int) -> Iterator[tuple[int, int]]:
    """Yields the divisions of a kind as (replicas, stages), for pipelines of at most ``longest`` stages."""
    for stages in range(1, min(ranks, longest) + 1):
        replicas = ranks // stages
        if replicas * stages == ranks:
            division: Kind = "data" if stages == 1 else "pipeline" if replicas == 1 else "both"
            if division == kind:
                yield replicas, stages
