"""What layers take on one rank here, measured: the times from which :mod:`econmt.parallel.cost_model` predicts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from econmt.bench.parallel_hardware import H200, paper_profile
from econmt.bench.training import vocabulary_sizes
from econmt.config.recipe import LanguageModelSection, Recipe
from econmt.data.batching.batch import AnyBatch
from econmt.engine.graphs import GraphedStep
from econmt.engine.precision import Precision, precision_of
from econmt.engine.step import TrainingStep
from econmt.memory.measure.ledger import measure_step
from econmt.model import Implementations
from econmt.parallel.cost_layers import Layer, Phase, Profile, value_at
from econmt.tasks.protocol import Shape
from econmt.tasks.registry import task_of_sizes
from econmt.training.choice import choose_implementations, measure
from econmt_ops.dispatch.measurements import Measurement
from econmt_ops.dispatch.rule import captured
from econmt_ops.dispatch.timing import quantile, synchronizer
from econmt_ops.lstm.chunked import leaves_gradients

LEAST = 3
"""Updates that are timed however long they take."""

TURNS = 3
"""How often each number of rows is timed, in turns; the quickest counts."""

SHORT = 4
"""By how much shorter rows are from which comes what a call takes beside its steps."""


def shape_of(recipe: Recipe, rows: int, length: int) -> Shape:
    """Full rows: as many positions on both sides, one source position where there is no source."""
    return Shape(rows, 1 if isinstance(recipe.model, LanguageModelSection) else length, length)


def chosen_by_auto(recipe: Recipe, rows: int, length: int, device: str, precision: str) -> Implementations:
    """The ops that a run of this shape would use: measured on the CPU, by the rule in CUDA graphs."""
    found: list[Measurement] = []
    place = torch.device(device)
    if device == "cpu":
        task = task_of_sizes(recipe, vocabulary_sizes(recipe))
        model = task.build_model().train()
        session = measure(
            task, model, shape_of(recipe, rows, length), place, precision_of(precision, place, [recipe])
        )
        found = list(session.measurements.values())
    with captured(device == "cuda"):
        return choose_implementations(Implementations.of(recipe.ops), found, device=device)


class Alone:
    """Updates of a recipe in one process, as a run does them: on a GPU in CUDA graphs.

    Args:
        recipe: the run.
        device: where. precision: of products. how: implementations of the ops.
    """

    def __init__(
        self, recipe: Recipe, device: torch.device, precision: Precision, how: Implementations
    ) -> None:
        torch.manual_seed(recipe.training.seed)
        self.recipe, self.device = recipe, device
        self.task = task_of_sizes(recipe, vocabulary_sizes(recipe))
        self.step = TrainingStep(
            self.task, self.task.build_model().to(device).train(), precision, implementations=how
        )
        self._graphed = GraphedStep(self.step) if device.type == "cuda" else None
        self._synchronize = synchronizer(device)

    def batch(self, rows: int, length: int) -> AnyBatch:
        """A batch of full rows of random ids, on the CPU."""
        return self.task.example(shape_of(self.recipe, rows, length))

    def update(self, batch: AnyBatch) -> float:
        """Seconds of one update."""
        began = time.perf_counter()
        if self._graphed is None:
            self.step([batch])
        else:
            self._graphed([batch])
        self._synchronize()
        return time.perf_counter() - began

    def seconds(self, rows: int, length: int, budget: float) -> float:
        """The lowest decile of updates of a shape, timed for about so many seconds, after two that are not.

        What else a machine does only adds to times, and not to all alike.
        """
        batch = self.batch(rows, length)
        for _ in range(2):
            self.update(batch)
        times: list[float] = []
        while len(times) < LEAST or sum(times) < budget:
            times.append(self.update(batch))
        return quantile(times, 0.1)


class _Shares(NamedTuple):
    """Seconds of an update by phase and by the ledger's layer, and of the optimizer; bytes kept by layer."""

    layers: dict[tuple[str, str], float]
    optimizer: float
    kept: dict[str, int]


def measured_profile(alone: Alone, rows: Sequence[int], length: int, budget: float) -> Profile:
    """Times the layers of a recipe for several numbers of rows.

    Updates are timed as a run does them. How a time is divided among layers comes on the CPU from an update with marks
    between them; on a GPU, where an update is one graph, from their operations and bytes
    (:func:`econmt.bench.parallel_hardware.paper_profile`). The recurrent layers of a stack share its time by their
    parameters; which part of it makes the gradients of weights comes from operations and bytes everywhere.

    Args:
        alone: updates in this process. rows: how many, rising. length: of rows.
        budget: seconds for each number of rows.
    """
    recipe = alone.recipe
    paper = paper_profile(recipe, vocabulary_sizes(recipe), H200, 4, length)
    layers = _real_parameters(alone, paper.layers)
    turns = [[alone.seconds(count, length, budget / TURNS) for count in rows] for _ in range(TURNS)]
    seconds = {count: min(times) for count, times in zip(rows, zip(*turns, strict=True), strict=True)}
    whole = sum(layer.parameters for layer in layers)
    updating = whole * paper.update
    parts = {count: _parts(alone, layers, count, length, seconds[count], updating) for count in rows}
    calls = _calls(alone, parts[rows[0]], rows[0], length, seconds[rows[0]], budget)
    most = parts[rows[-1]]
    positions = rows[-1] * length
    autocast = alone.step.precision.dtype != torch.float32
    return Profile(
        tuple(
            _parted(_timed(layer, layers, parts, calls, length, most.kept, positions), layer, alone)
            for layer in layers
        ),
        update=most.optimizer / whole,
        overhead=sum(most.layers.get((phase, "other"), 0.0) for phase in PHASES),
        value_bytes=2 if autocast else 4,
        gradient_bytes=paper.gradient_bytes,
        state_bytes=paper.state_bytes,
        tied=paper.tied,
    )


PHASES: tuple[Phase, Phase] = ("forward", "backward")


def _real_parameters(alone: Alone, layers: Sequence[Layer]) -> list[Layer]:
    """The layers with as many parameters as those of the ledger really have together."""
    counts: dict[str, int] = defaultdict(int)
    of_names = alone.task.layers(alone.step.model)
    for name, parameter in alone.step.model.named_parameters():
        counts[of_names[name]] += parameter.numel()
    found = []
    for layer in layers:
        there = sum(each.parameters for each in layers if _account(each) == _account(layer))
        real = sum(counts[account] for account in _accounts(layer, layers))
        found.append(layer._replace(parameters=layer.parameters * real / there if there else 0.0))
    return found


def _account(layer: Layer) -> str:
    """The ledger's layer that a layer belongs to."""
    return "embedding" if layer.name.endswith("embedding") else layer.node


def _accounts(layer: Layer, layers: Sequence[Layer]) -> list[str]:
    """The ledger's layers whose times and parameters a layer shares: a loop with input feeding has the attention's."""
    own = _account(layer)
    accounts = {_account(each) for each in layers}
    return [own, "attention"] if own == "decoder" and "attention" not in accounts else [own]


def _parts(
    alone: Alone, layers: Sequence[Layer], rows: int, length: int, seconds: float, updating: float
) -> _Shares:
    """An update that took so many seconds, divided; ``updating``: what the optimizer takes on paper."""
    ledger = measure_step(alone.step, alone.batch(rows, length), timed=alone.device.type == "cpu")
    if alone.device.type == "cpu":
        spent = dict(ledger.milliseconds)
    else:
        spent = _on_paper(layers, rows, length, updating)
    scale = seconds / sum(spent.values())
    parts: dict[tuple[str, str], float] = defaultdict(float)
    for (phase, layer), value in spent.items():
        if phase in PHASES:
            parts[phase, layer] += value * scale
    optimizer = sum(value for (phase, _), value in spent.items() if phase == "optimizer") * scale
    return _Shares(dict(parts), optimizer, dict(ledger.stash))


def _on_paper(
    layers: Sequence[Layer], rows: int, length: int, updating: float
) -> dict[tuple[str, str], float]:
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for layer in layers:
        for phase in PHASES:
            spent[phase, _account(layer)] += layer.seconds(phase, rows, length, length)
        spent["backward", _account(layer)] += layer.gathered(rows, length)
    spent["optimizer", "other"] = updating
    return spent


def _calls(alone: Alone, parts: _Shares, rows: int, length: int, whole: float, budget: float) -> float:
    """Share of the time of few rows that does not shrink with their steps; nothing where these are few, too."""
    short = length // SHORT
    if short < 2:
        return 0.0
    seconds = whole, alone.seconds(rows, short, budget)
    # What is linear in the steps is the same a step in both; the rest, less the optimizer, is there once in each.
    per_step = (seconds[0] - seconds[1]) / (length - short)
    once = max(0.0, seconds[0] - per_step * length - parts.optimizer)
    return min(1.0, once / max(1e-12, seconds[0] - parts.optimizer))


def _timed(
    layer: Layer,
    layers: Sequence[Layer],
    parts: dict[int, _Shares],
    calls: float,
    length: int,
    kept: dict[str, int],
    positions: int,
) -> Layer:
    """A layer with its share of what was measured of its stack."""
    accounts = _accounts(layer, layers)
    alike = [each for each in layers if _account(each) == _account(layer)]
    weights = sum(each.parameters for each in alike)
    share = layer.parameters / weights if weights else 1.0 / len(alike)
    recurrent = layer.unit == "steps"
    once = calls if recurrent else 0.0
    curves, beside = [], []
    for phase in PHASES:
        times = {
            rows: share * sum(found.layers.get((phase, account), 0.0) for account in accounts)
            for rows, found in parts.items()
        }
        call = once * times[min(times)]
        if recurrent:
            points = [(float(rows), max(0.0, value - call) / length) for rows, value in times.items()]
        else:
            pairs = length if layer.unit == "pairs" else 1
            points = [(float(rows * length * pairs), value) for rows, value in times.items()]
        curves.append(tuple(points))
        beside.append(call)
    stash = share * sum(kept.get(account, 0) for account in accounts) / positions
    return layer._replace(forward=curves[0], backward=curves[1], call=(beside[0], beside[1]), kept=stash)


def _parted(timed: Layer, paper: Layer, alone: Alone) -> Layer:
    """A layer of which what waits until all chunks are through is apart, as it is on paper."""
    how, lone = alone.step.implementations, isinstance(alone.recipe.model, LanguageModelSection)
    named = how.encoder if lone or paper.side == "source" else how.decoder
    if timed.unit != "steps" or not leaves_gradients(named):
        return timed
    backward, gather = [], []
    for rows, seconds in timed.backward:
        waits, others = value_at(paper.gather, rows), value_at(paper.backward, rows)
        share = waits / (waits + others)
        backward.append((rows, seconds * (1.0 - share)))
        gather.append((rows, seconds * share))
    forward, back = timed.call
    once = back * paper.once / (paper.once + paper.call[1]) if paper.once else 0.0
    return timed._replace(
        backward=tuple(backward), gather=tuple(gather), call=(forward, back - once), once=once
    )
