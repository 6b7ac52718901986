"""The parts of an update on a time line: each rank, and each link, does one thing after another, in a fixed order.

A pipeline's ranks look up what they have of a divided table; do all forward chunks, source before target, micro-batch
after micro-batch; then the output layer, forward and backward, each rank with its part of the vocabulary; then all
backward chunks, last first, and after the last one of a side the gradients of its weights. Ranks of other pipelines do
the same at the same time, so that one pipeline stands for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from econmt.parallel.cost_layers import (
    SIDES,
    Batch,
    Division,
    Layer,
    Phase,
    Profile,
    Side,
    partition,
    value_at,
)
from econmt.parallel.cost_network import (
    Group,
    Machine,
    all_gather_seconds,
    all_reduce_bytes,
    all_reduce_seconds,
)

BUCKET = 25 * 2**20
"""Bytes of gradients that are added up at once, as in PyTorch's DistributedDataParallel (Li et al., 2020)."""

SMALL_EXCHANGES = 2
"""All-reduces of a few bytes an update, at most: the loss over replicas, the norms of gradients over stages."""


class Times(NamedTuple):
    """Of one update.

    Attributes:
        seconds: from its beginning to its end. busiest: that the busiest rank computes.
        wire: bytes that the rank which sends most sends.
    """

    seconds: float
    busiest: float
    wire: float


def schedule(profile: Profile, machine: Machine, division: Division, batch: Batch) -> Times:
    """The time line of an update."""
    return _Update(profile.over_stages() if division.stages > 1 else profile, machine, division, batch).run()


class _Update:
    def __init__(self, profile: Profile, machine: Machine, division: Division, batch: Batch) -> None:
        self.profile, self.machine, self.division, self.batch = profile, machine, division, batch
        self.stages = partition(profile, division.stages, batch)
        self.last = division.stages - 1
        self.rows = ceil(ceil(batch.rows / division.data) / division.micro_batches)
        busy = min(division.ranks, machine.ranks_per_host)
        self.crowding = value_at(machine.crowding, min(busy, machine.crowding[-1][0]))
        # A pipeline's stages are neighbours, on one host if it has room for them.
        inside = division.stages <= machine.ranks_per_host
        self.link = (machine.messages or machine.within) if inside else machine.between
        self.free: dict[object, float] = defaultdict(float)
        self.computed: dict[object, float] = defaultdict(float)
        self.sent: dict[int, float] = defaultdict(float)

    def run(self) -> Times:
        """Everything from the first chunk to the updated parameters."""
        micro = range(self.division.micro_batches)
        look_up = self._look_up()
        ready = [self._do("hidden", look_up, 0.0) for _ in micro]
        for side in SIDES:
            if self.batch.steps(side):
                ready = [self._through(side, "forward", ready[number]) for number in micro]
        ready = [self._output(ready[number]) for number in micro]
        if not self.last:
            self._reduce(0, [self.profile.output], max(ready))
        for side in reversed(SIDES):
            if self.batch.steps(side):
                ready = [self._through(side, "backward", ready[number]) for number in micro]
                for stage in range(self.last + 1):
                    self._gather(stage, side)
                if not self.last:
                    own = [layer for layer in self.stages[0] if layer.side == side]
                    self._reduce(0, own, self.free["rank", 0])
        if self.last:
            # A gradient is complete after the last chunk only, that of a divided table when all have the vectors'.
            table = max(self.free.values()) + len(micro) * look_up if look_up else 0.0
            for stage, layers in enumerate(self.stages):
                self._reduce(stage, [*layers, self.profile.output], max(table, self.free["rank", stage]))
        return self._finish(max(self.free.values()))

    def _do(self, what: object, seconds: float, ready: float) -> float:
        """Puts something on the time line of a rank or a link; when it is done."""
        self.free[what] = max(self.free[what], ready) + seconds
        return self.free[what]

    def _compute(self, stage: int, seconds: float, ready: float, receiving: float = 0.0) -> float:
        """A rank computes; where it cannot do two things at once, it has to receive something first."""
        self.computed[stage] += seconds * self.crowding
        return self._do(("rank", stage), receiving + seconds * self.crowding, ready)

    def _through(self, side: Side, phase: Phase, ready: float) -> float:
        """Takes a micro-batch through all layers of a side; when the last of them is done."""
        order = range(self.last + 1) if phase == "forward" else range(self.last, -1, -1)
        used = [stage for stage in order if any(layer.side == side for layer in self.stages[stage])]
        steps = self.batch.steps(side)
        chunks = min(self.division.chunks, steps)
        arrivals, receiving = [ready] * chunks, 0.0
        for place, stage in enumerate(used):
            layers = [layer for layer in self.stages[stage] if layer.side == side]
            for block in _blocks(layers if phase == "forward" else layers[::-1]):
                arrivals = self._block(stage, block, phase, arrivals, receiving, steps)
                receiving = 0.0
            if place + 1 < len(used):
                width = (layers if phase == "forward" else self._of(used[place + 1], side))[-1].width
                size = self.rows * steps / chunks * width * self.profile.value_bytes
                arrivals = [self._send(stage, size, done) for done in arrivals]
                receiving = 0.0 if self.machine.overlaps else self.link.seconds(size)
        return max(arrivals)

    def _gather(self, stage: int, side: Side) -> None:
        """The gradients of the weights of a stage's layers that have worked chunk by chunk."""
        rows, steps = self.rows * self.division.micro_batches, self.batch.steps(side)
        own = [layer for layer in self._of(stage, side) if not layer.whole]
        self._compute(stage, sum(layer.gathered(rows, steps) for layer in own), 0.0)

    def _of(self, stage: int, side: Side) -> list[Layer]:
        return [layer for layer in self.stages[stage] if layer.side == side]

    def _block(
        self,
        stage: int,
        block: Sequence[Layer],
        phase: Phase,
        arrivals: list[float],
        receiving: float,
        steps: int,
    ) -> list[float]:
        """Layers of a stage that work chunk by chunk, or one that needs all steps at once; when each chunk is done."""
        chunks = len(arrivals)
        if block[0].whole:
            seconds = block[0].seconds(phase, self.rows, steps, self.batch.source)
            if phase == "backward":
                seconds += block[0].gathered(self.rows, steps)
            return [self._both_ends(stage, block[0], seconds, max(arrivals), receiving * chunks)] * chunks
        seconds = sum(layer.seconds(phase, self.rows, steps / chunks, self.batch.source) for layer in block)
        return [self._compute(stage, seconds, ready - receiving, receiving) for ready in arrivals]

    def _both_ends(self, stage: int, layer: Layer, seconds: float, ready: float, receiving: float) -> float:
        """A layer that reads from both ends: in a pipeline the second rank has one direction; when both are done."""
        if not self.last:
            return self._compute(stage, seconds, ready, receiving)
        other = 1 if stage == 0 else 0
        values = self.rows * self.batch.steps(layer.side) * self.profile.value_bytes
        first = self._compute(stage, seconds / 2.0, ready, receiving)
        second = self._compute(other, seconds / 2.0, ready)
        return max(first, self._send(other, values * layer.width / 2.0, second))

    def _send(self, stage: int, size: float, ready: float) -> float:
        """A message to the next rank; when it is there."""
        self.sent[stage] += size
        who = ("link", stage) if self.machine.overlaps else ("rank", stage)
        return self._do(who, self.link.seconds(size), ready)

    def _output(self, ready: float) -> float:
        """The output layer and the loss, forward and backward, of a micro-batch."""
        output, stages = self.profile.output, self.last + 1
        shape = (self.rows, self.batch.target, self.batch.source)
        seconds = (output.seconds("forward", *shape) + output.seconds("backward", *shape)) / stages
        if stages == 1:
            return self._compute(0, seconds, ready)
        # Hidden vectors go to all ranks, and their gradients come back.
        positions = self.rows * self.batch.target
        width = next(layer.width for layer in reversed(self.stages[self.last]) if layer.side == "target")
        size = positions * width * self.profile.value_bytes
        exchange = self._from_rank_to_rank(size)
        group = Group.of(self.machine, stages)
        sums = all_reduce_seconds(8.0 * positions, group)  # a softmax's largest value and sum, in float32
        for stage in range(stages):
            self.sent[stage] += 2.0 * size + all_reduce_bytes(8.0 * positions, stages)
        arrived = self._do("hidden", exchange, ready)
        done = max(self._compute(stage, seconds, arrived) for stage in range(stages))
        return self._do("hidden", sums + exchange, done)

    def _look_up(self) -> float:
        """Seconds in which the vectors of a micro-batch, in float32, come from a table that is divided.

        Their gradients take as long to go to all ranks.
        """
        if not self.last:
            return 0.0
        values = sum(layer.width * self.batch.steps(layer.side) for layer in self.profile.readers_of_tied)
        size = 4.0 * self.rows * values
        for stage in range(self.last + 1):
            self.sent[stage] += 2.0 * size * self.division.micro_batches
        return self._from_rank_to_rank(size) if size else 0.0

    def _from_rank_to_rank(self, size: float) -> float:
        """Seconds in which bytes go through all ranks of a pipeline, in parts that follow each other."""
        return self.last * self.link.latency + size / self.link.bandwidth

    def _reduce(self, stage: int, layers: Sequence[Layer], ready: float) -> None:
        """Adds gradients up over pipelines, in buckets, part after part of the backward pass."""
        if self.division.data == 1:
            self.free["rank", stage] = max(self.free["rank", stage], ready)
            return
        group = Group.of(self.machine, self.division.data, self.division.stages)
        nodes: dict[str, float] = defaultdict(float)
        for layer in layers:
            shares = self.last + 1 if layer is self.profile.output else 1
            nodes[layer.node] += layer.parameters * self.profile.gradient_bytes / shares
        for size in nodes.values():
            buckets = max(1, ceil(size / BUCKET))
            seconds = buckets * all_reduce_seconds(size / buckets, group)
            self.sent[stage] += all_reduce_bytes(size, group.size)
            self._do(("network" if self.machine.overlaps else "rank", stage), seconds, ready)

    def _finish(self, ready: float) -> Times:
        """Bounds the gradient and updates the parameters, when all ranks have all of it."""
        division, profile = self.division, self.profile
        if division.ranks > 1:
            ready += SMALL_EXCHANGES * all_reduce_seconds(8.0, Group.of(self.machine, division.ranks))
        output = profile.output.parameters / division.stages
        most = output + max(sum(layer.parameters for layer in stage) for stage in self.stages)
        own = most / (division.data if division.sharded else 1)
        seconds = profile.update * own * self.crowding + profile.overhead
        busiest = max(self.computed.values()) + seconds
        if division.sharded and division.data > 1:
            group = Group.of(self.machine, division.data, division.stages)
            seconds += all_gather_seconds(most * 4.0, group)
            for stage in range(division.stages):
                self.sent[stage] += most * 4.0 * (division.data - 1) / division.data
        return Times(ready + seconds, busiest, max(self.sent.values(), default=0.0))


def _blocks(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Neighbours that work chunk by chunk together; each layer that needs all steps at once by itself."""
    found: list[list[Layer]] = []
    for layer in layers:
        if not found or layer.whole or found[-1][0].whole:
            found.append([])
        found[-1].append(layer)
    return found
