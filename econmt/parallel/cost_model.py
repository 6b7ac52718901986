"""How long an update takes on many ranks, on paper: from times of layers on one, and from latency and bandwidth.

What is predicted is the update of :class:`econmt.engine.step.TrainingStep` under three divisions:

- data: every rank has the whole model and a share of the rows; gradients are added up in buckets as soon as the
  backward pass has them.
- pipeline: every rank has some layers. Time is cut into chunks, and layer l works on chunk c while layer l + 1 works on
  chunk c - 1, a wavefront; rows may be cut into micro-batches besides, which econmt does not do. The output layer is
  divided over the ranks by vocabulary.
- both: so many pipelines, each with a share of the rows.

:mod:`econmt.parallel.cost_schedule` puts the parts of an update on a time line. What is assumed, here and there: all
ranks are alike; a recurrent layer takes a time a step that depends on the rows alone, and does not vanish with them;
chunks and micro-batches are equally large; a link is shared by nobody; nobody waits for data, a file or Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Literal, NamedTuple

from econmt.parallel.cost_layers import Batch, Division, Profile, partition
from econmt.parallel.cost_network import Machine
from econmt.parallel.cost_schedule import schedule

Kind = Literal["data", "pipeline", "both"]
KINDS: tuple[Kind, ...] = ("data", "pipeline", "both")

CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 50)
"""Chunks of time that are tried."""

WEIGHT_BYTES = GRADIENT_BYTES = 4
"""Of a parameter, and of its gradient where it is held."""

MICRO_BATCHES = (1, 2, 4, 8)
"""Micro-batches that are tried if they are asked for."""


class Prediction(NamedTuple):
    """What an update takes, averaged over shapes.

    Attributes:
        division: of the ranks.
        seconds: of an update. tokens: that it sees, padding not counted.
        communication: share of the time that would be saved if links took none.
        idle: share in which the busiest rank waits for others although links take no time.
        wire: bytes that the rank which sends most sends. memory: bytes of the fullest rank, the allocator's waste not
            counted.
    """

    division: Division
    seconds: float
    tokens: float
    communication: float
    idle: float
    wire: float
    memory: float

    @property
    def tokens_per_second(self) -> float:
        """Throughput, padding not counted."""
        return self.tokens / self.seconds


def divisions(profile: Profile, machine: Machine, ranks: int, kind: Kind) -> Iterator[tuple[int, int]]:
    """(data, stages) of a kind for so many ranks; the stages of a pipeline share a host where one has room for two."""
    most = profile.most_stages()
    room = machine.ranks_per_host if machine.ranks_per_host > 1 else most
    for stages in range(1, min(ranks, most, room) + 1):
        data = ranks // stages
        if data * stages == ranks and kind == _kind_of(data, stages):
            yield data, stages


def _kind_of(data: int, stages: int) -> Kind:
    if stages == 1:
        return "data"
    return "pipeline" if data == 1 else "both"


def predict(profile: Profile, machine: Machine, division: Division, batches: Sequence[Batch]) -> Prediction:
    """What updates take under a division.

    Args:
        profile: the model on one rank. machine: the ranks.
        division: how they share it; each of its ``data`` parts must have a row.
        batches: the shapes of updates.
    """
    timed = [(batch.share, schedule(profile, machine, division, batch)) for batch in batches]
    free = [schedule(profile, machine.without_exchanges(), division, batch).seconds for batch in batches]
    shares = sum(share for share, _ in timed)
    seconds = sum(share * times.seconds for share, times in timed) / shares
    alone = sum(batch.share * each for batch, each in zip(batches, free, strict=True)) / shares
    busy = sum(share * times.busiest for share, times in timed) / shares
    return Prediction(
        division,
        seconds,
        tokens=sum(batch.share * batch.tokens for batch in batches) / shares,
        communication=1.0 - alone / seconds,
        idle=max(0.0, alone - busy) / seconds,
        wire=max(times.wire for _, times in timed),
        memory=max(memory_bytes(profile, division, batch) for batch in batches),
    )


def memory_bytes(profile: Profile, division: Division, batch: Batch) -> float:
    """Bytes of weights, gradients, optimizer state and feature maps on the fullest rank.

    A rank of a pipeline has all weights, but gradients, state and feature maps of its stage alone. Gradients that are
    added up over ranks are there twice, since they travel in buckets.
    """
    profile = profile.over_stages() if division.stages > 1 else profile
    rows = ceil(batch.rows / division.data)
    state = profile.state_bytes / (division.data if division.sharded else 1)
    travels = profile.gradient_bytes if division.data > 1 else 0
    own = GRADIENT_BYTES + state + travels
    output = profile.output
    weights = WEIGHT_BYTES * sum(layer.parameters for layer in profile.layers)
    shared = (output.parameters * own + output.kept * rows * batch.target) / division.stages
    return (
        weights
        + shared
        + max(
            sum(layer.parameters * own + layer.kept * rows * batch.steps(layer.side) for layer in stage)
            for stage in partition(profile, division.stages, batch)
        )
    )


def best(
    profile: Profile,
    machine: Machine,
    ranks: int,
    kind: Kind,
    batches: Sequence[Batch],
    *,
    sharded: bool = False,
    micro_batches: bool = False,
) -> Prediction | None:
    """The fastest division of a kind; None if there is none, as there are more ranks than rows or layers.

    Chunks are chosen by the shape on which most time is spent.

    Args:
        profile: the model on one rank. machine: the ranks. ranks: how many. kind: of division.
        batches: the shapes of updates.
        sharded: whether ranks share the optimizer's state out.
        micro_batches: whether pipelines may cut rows, too.
    """
    heaviest = max(batches, key=lambda batch: batch.share * batch.rows * (batch.source + batch.target))
    found: list[Prediction] = []
    for data, stages in divisions(profile, machine, ranks, kind):
        if data > min(batch.rows for batch in batches):
            continue
        tried = [
            predict(profile, machine, division, [heaviest])
            for division in _cut(data, stages, heaviest, sharded, MICRO_BATCHES if micro_batches else (1,))
        ]
        division = min(tried, key=lambda each: each.seconds).division
        found.append(predict(profile, machine, division, batches))
    return min(found, key=lambda each: each.seconds, default=None)


def _cut(
    data: int, stages: int, batch: Batch, sharded: bool, micro_batches: Sequence[int]
) -> Iterator[Division]:
    if stages == 1:
        yield Division(data, sharded=sharded)
        return
    for micro in micro_batches:
        for chunks in CHUNKS:
            if micro <= batch.rows / data and chunks <= batch.target:
                yield Division(data, stages, chunks, micro, sharded)
