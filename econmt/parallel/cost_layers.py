"""A model on one rank, and how ranks may share an update of it, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Points = tuple[tuple[float, float], ...]
"""A function that is linear between its points (x, y), x rising, and goes on as its first and last pieces do."""

Unit = Literal["steps", "positions", "pairs"]
Side = Literal["source", "target"]
Phase = Literal["forward", "backward"]
SIDES: tuple[Side, ...] = ("source", "target")


def value_at(points: Points, x: float) -> float:
    """The function of some points at ``x``; never below 0."""
    if len(points) == 1:
        return points[0][1]
    last = next((place for place, point in enumerate(points) if point[0] >= x), len(points) - 1)
    (left, low), (right, high) = points[max(0, last - 1)], points[max(1, last)]
    return max(0.0, low + (high - low) * (x - left) / (right - left))


class Layer(NamedTuple):
    """A part of a model, and what it takes on one rank.

    Attributes:
        name: for tables. side: whose positions it works on.
        node: the part of the backward pass that it belongs to: gradients are there when all of that is done.
        parameters: how many it has.
        unit: what its times count. "steps": a recurrence, seconds a time step by rows; "positions", "pairs": seconds by
            rows x steps, and of pairs x source positions.
        forward, backward: these times.
        call: seconds beside them for each call, forward and backward; a chunk is a call.
        whole: it has to have all steps at once, as what reads from both ends has.
        width: values a position that the next layer gets.
        kept: bytes of feature maps a position.
        gather, once: of a recurrence what waits until all its chunks are through, the gradients of its weights:
            seconds a time step by rows, and seconds beside.
    """

    name: str
    side: Side
    node: str
    parameters: float
    unit: Unit
    forward: Points
    backward: Points
    call: tuple[float, float] = (0.0, 0.0)
    whole: bool = False
    width: int = 0
    kept: float = 0.0
    gather: Points = ((0.0, 0.0),)
    once: float = 0.0

    def gathered(self, rows: float, steps: float) -> float:
        """Seconds of what waits until so many steps are through, whose rows are those of all micro-batches."""
        return self.once + steps * value_at(self.gather, rows)

    def seconds(self, phase: Phase, rows: float, steps: float, source: float) -> float:
        """Of a call with so many rows and steps, and source positions to attend to."""
        points, call = (self.forward, self.call[0]) if phase == "forward" else (self.backward, self.call[1])
        if self.unit == "steps":
            return call + steps * value_at(points, rows)
        return call + value_at(points, rows * steps * (source if self.unit == "pairs" else 1.0))


class Profile(NamedTuple):
    """A model on one rank.

    Attributes:
        layers: in the order of the forward pass, the output layer last.
        update: seconds a parameter that bounding its gradient and updating it take.
        overhead: seconds an update beside.
        value_bytes: of a value that goes from a layer to the next one on another rank. gradient_bytes: of one gradient
            that travels.
        state_bytes: of the optimizer's state of a parameter.
        tied: the name of the table whose matrix is the output layer's, too, and is counted there; empty: none is.
    """

    layers: tuple[Layer, ...]
    update: float
    overhead: float = 0.0
    value_bytes: int = 4
    gradient_bytes: int = 4
    state_bytes: int = 8
    tied: str = ""

    def over_stages(self) -> Profile:
        """The same for a pipeline, in which a tied matrix is divided as the output layer's rows are."""
        if not self.tied:
            return self
        table = next(layer for layer in self.layers if layer.name == self.tied)
        output = self.output._replace(parameters=table.parameters)
        body = [layer._replace(parameters=0.0) if layer.name == self.tied else layer for layer in self.body]
        return self._replace(layers=(*body, output))

    @property
    def readers_of_tied(self) -> list[Layer]:
        """What reads the tied matrix where a pipeline divides it: tables that have no parameters of their own there."""
        if not self.tied:
            return []
        body = self.over_stages().body
        tables = (layer for layer in body if layer.name == self.tied or layer.name.endswith("embedding"))
        return [table for table in tables if table.parameters == 0.0]

    @property
    def body(self) -> tuple[Layer, ...]:
        """All layers but the output layer."""
        return self.layers[:-1]

    @property
    def output(self) -> Layer:
        """The output layer with the loss."""
        return self.layers[-1]

    def most_stages(self) -> int:
        """Ranks over which the recurrent layers of the longer side can be divided."""
        return max(
            1, *(sum(layer.unit == "steps" and layer.side == side for layer in self.body) for side in SIDES)
        )


class Batch(NamedTuple):
    """What updates see, of one shape.

    Attributes:
        rows: of the whole batch. source, target: positions of the shape; 0 source positions where there is no source.
        tokens: target tokens of all rows, padding not counted.
        share: of the updates that are of this shape.
    """

    rows: float
    source: int
    target: int
    tokens: float
    share: float = 1.0

    def steps(self, side: Side) -> int:
        """Positions of a side."""
        return self.source if side == "source" else self.target

    def grown(self, factor: float) -> Batch:
        """With so many times the rows."""
        return self._replace(rows=self.rows * factor, tokens=self.tokens * factor)


class Division(NamedTuple):
    """How ranks share an update.

    Attributes:
        data: pipelines, or ranks that have the whole model. stages: of a pipeline.
        chunks: of time. micro_batches: of rows.
        sharded: whether each of the ``data`` ranks keeps the optimizer's state of its share of the parameters alone.
    """

    data: int = 1
    stages: int = 1
    chunks: int = 1
    micro_batches: int = 1
    sharded: bool = False

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.data * self.stages

    def __str__(self) -> str:
        if self.stages == 1:
            return f"{self.data} data" if self.data > 1 else "alone"
        return f"{self.data} x {self.stages} stages" if self.data > 1 else f"{self.stages} stages"

    @property
    def cuts(self) -> str:
        """How a pipeline cuts its work: chunks, and micro-batches if there are several."""
        if self.stages == 1:
            return ""
        return f"{self.chunks} x {self.micro_batches}" if self.micro_batches > 1 else str(self.chunks)


def partition(profile: Profile, stages: int, batch: Batch) -> list[list[Layer]]:
    """Layers of each stage: of each side neighbours, so that the busiest stage of the side has least to do.

    What is no recurrence stays with the recurrent layer below it, embeddings with the one above. A side of fewer
    recurrent layers than stages takes the first stages if it is the source, else the last.
    """
    found: list[list[Layer]] = [[] for _ in range(stages)]
    for side in SIDES:
        groups: list[list[Layer]] = []
        for layer in (layer for layer in profile.body if layer.side == side):
            if not groups or (layer.unit == "steps" and any(each.unit == "steps" for each in groups[-1])):
                groups.append([])
            groups[-1].append(layer)
        costs = [sum(_both_ways(layer, batch) for layer in group) for group in groups]
        parts = min(stages, len(groups))
        first = 0 if side == "source" else stages - parts
        for number, (begin, end) in enumerate(balanced(costs, parts)):
            found[first + number] += [layer for group in groups[begin:end] for layer in group]
    return found


def _both_ways(layer: Layer, batch: Batch) -> float:
    steps = batch.steps(layer.side)
    shape = (batch.rows, steps, batch.source)
    both = layer.seconds("forward", *shape) + layer.seconds("backward", *shape)
    return both + layer.gathered(batch.rows, steps)


def balanced(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """Divides a row of costs into so many pieces of neighbours, none empty, whose largest sum is as small as possible.

    Returns:
        Begin and end of each piece.
    """
    if parts == 0:
        return []
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    count = len(costs)
    best = {(1, end): (sums[end], 0) for end in range(1, count + 1)}
    for part in range(2, parts + 1):
        for end in range(part, count + 1):
            best[part, end] = min(
                (max(best[part - 1, begin][0], sums[end] - sums[begin]), begin)
                for begin in range(part - 1, end)
            )
    pieces, end = [], count
    for part in range(parts, 0, -1):
        begin = best[part, end][1]
        pieces.append((begin, end))
        end = begin
    return pieces[::-1]
