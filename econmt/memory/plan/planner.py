"""The plan of a run with a byte budget: for each shape of batches, what its step keeps and how many rows it takes.

A batch that does not fit whole, even when least is kept, is divided into micro-batches whose gradients are added up:
the update stays that of the whole batch. The plan is made before training from estimates, see
:mod:`econmt.memory.estimate.training_step`, and corrected if the device runs out of memory all the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from rich.table import Table

from econmt.data.batching.batch import AnyBatch, BatchShape
from econmt.errors import InputError
from econmt.memory.estimate.training_step import estimate_step
from econmt.memory.measure.byte_budget import nearest_budget, size_text
from econmt.memory.plan.fit import demand
from econmt.memory.plan.peaks import PeakModel
from econmt.model import Implementations
from econmt.parallel.simulated_rank import ALONE, Rank
from econmt.tasks.protocol import Shape, Task

RESERVE = 0.03
"""Share of a budget that no prediction may touch: how far one may be off."""

PeakOf = Callable[[Implementations, Shape, bool], int]
"""The bytes that a training step takes, from its setting, its shape and whether it adds to gradients."""


def usable(budget: int) -> int:
    """The bytes of a budget that predictions may use."""
    return int((1.0 - RESERVE) * budget)


def sufficient_budget(size: int) -> str:
    """A budget, as a recipe writes it, of which ``size`` bytes are usable."""
    return nearest_budget(math.ceil((size + 1) / (1.0 - RESERVE)) + 1)


class BatchBudget(NamedTuple):
    """Budget of the batches of one padded shape.

    Attributes:
        source, target: the shape.
        sentences: the most rows of a batch.
        batches: how many an epoch has; 0: a shape that training does not have, as in validation.
        rows: the most rows of a micro-batch.
        peak: predicted bytes of its step.
        implementations: of the ops.
    """

    source: int
    target: int
    sentences: int
    batches: int
    rows: int
    peak: int
    implementations: Implementations

    @property
    def parts(self) -> int:
        """Micro-batches of a batch."""
        return -(-self.sentences // self.rows)


class MemoryPlan:
    """Allotments of all shapes of a run.

    Args:
        budget: bytes.
        allotments: one a shape.
        decoding_rows: sentences that validation translates together.
    """

    def __init__(self, budget: int, allotments: Iterable[BatchBudget], decoding_rows: int) -> None:
        self.budget = budget
        self.decoding_rows = decoding_rows
        self._by_shape = {(entry.source, entry.target): entry for entry in allotments}

    def __iter__(self) -> Iterator[BatchBudget]:
        return iter(self._by_shape.values())

    @property
    def worst(self) -> BatchBudget:
        """Budget of the training shape with the highest predicted peak."""
        trained = [entry for entry in self if entry.batches]
        return max(trained, key=lambda entry: (entry.peak, entry.rows * entry.source * entry.target))

    def find(self, batch: AnyBatch) -> BatchBudget:
        """Returns a batch's budget: that of its shape or, if there is none, one derived from the others."""
        rows, (source, target) = len(batch.indices), batch.positions
        exact = self._by_shape.get((source, target))
        if exact is not None:
            return exact
        found = [_adapt(entry, rows, source, target) for entry in self]
        return max(found, key=lambda entry: (entry.rows, -entry.peak))

    def halve(self, entry: BatchBudget, rows: int) -> BatchBudget:
        """Learn that micro-batches of ``rows`` rows, at least 2, were too large for an allotment."""
        smaller = entry._replace(rows=-(-rows // 2))
        self._by_shape[entry.source, entry.target] = smaller
        return smaller

    # ------------------------------------------------------------------ as data

    def state_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        rows = [[*entry[:-1], *entry.implementations] for entry in self]
        return {"budget": self.budget, "decoding_rows": self.decoding_rows, "allotments": rows}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> MemoryPlan:
        """The plan that :meth:`state_dict` told."""
        count = len(BatchBudget._fields) - 1
        rows = state["allotments"]
        entries = [BatchBudget._make([*row[:count], Implementations(*row[count:])]) for row in rows]
        return cls(state["budget"], entries, state["decoding_rows"])


def _adapt(entry: BatchBudget, rows: int, source: int, target: int) -> BatchBudget:
    """The allotment of another shape.

    Every term of a step's bytes has the rows as a factor and each kind of positions at most once, so that a shape with
    ever so many times the positions of ``entry`` takes no more bytes with so many times fewer rows.
    """
    positions = max(source, entry.source) * max(target, entry.target)
    most = entry.rows * entry.source * entry.target // positions
    return entry._replace(
        source=source, target=target, sentences=rows, batches=0, rows=max(1, min(rows, most))
    )


# ---------------------------------------------------------------------- making one


class Planner:
    """Finds the fastest setting of each shape that fits, and divides batches for which none does.

    Args:
        shapes: of the batches.
        settings: what to choose from, fastest first, each keeping less than the one before; see
            :func:`econmt.memory.plan.prices.settings`.
        budget: bytes.
        peak: of a step.
        accumulating: whether every update adds up several batches.
        width: of the buckets.
    """

    def __init__(
        self,
        shapes: Sequence[BatchShape],
        settings: Sequence[Implementations],
        budget: int,
        peak: PeakOf,
        *,
        accumulating: bool,
        width: int,
    ) -> None:
        self._shapes = shapes
        self._settings = settings
        self._budget = budget
        self._limit = usable(budget)
        self._peak = peak
        self._accumulating = accumulating
        self._width = width
        self._largest = Shape(*(max(shape[field] for shape in shapes) for field in (2, 0, 1)))

    def allot(self) -> list[BatchBudget]:
        """An allotment for each shape: the fastest setting with which whole batches fit, of those that were looked at.

        They are the first and the last, between them as few as bisection needs to find the fastest that suits all
        shapes, and the middle one if none does.

        Raises:
            InputError: if one sentence of the largest shape does not fit.
        """
        chosen: dict[tuple[int, int], tuple[int, BatchBudget]] = {}
        leanest = self._peaks(self._settings[-1], True)
        if leanest.fixed > self._limit:  # refused after two small estimates, before any of whole batches
            self._refuse_unless_one_fits(self._shapes, self._settings[-1], leanest)

        def suits_all(index: int) -> bool:
            entries = self._whole(self._settings[index])
            for entry in entries:
                shape = entry.source, entry.target
                chosen[shape] = min((index, entry), chosen.get(shape, (index, entry)))
            return len(entries) == len(self._shapes)

        fails, fits = 0, len(self._settings) - 1
        if not suits_all(fails) and fits > fails:
            if suits_all(fits):
                while fits - fails > 1:
                    middle = (fails + fits) // 2
                    fails, fits = (fails, middle) if suits_all(middle) else (middle, fits)
            elif fits > 1:
                suits_all(fits // 2)
        left = [shape for shape in self._shapes if (shape.source, shape.target) not in chosen]
        found = [entry for _, entry in chosen.values()]
        found += self._divided(left, self._settings[-1]) if left else []
        return sorted(found, key=lambda entry: (entry.target, entry.source))

    def _peaks(self, setting: Implementations, accumulating: bool) -> PeakModel:
        return PeakModel(lambda shape: self._peak(setting, shape, accumulating), self._largest)

    def _whole(self, setting: Implementations) -> list[BatchBudget]:
        """Allotments of the shapes whose full batches fit."""
        peaks = self._peaks(setting, self._accumulating)
        if peaks.fixed > self._limit:
            return []
        if peaks.most <= self._limit:
            return [BatchBudget(*shape, shape.rows, peaks.most, setting) for shape in self._shapes]
        while True:
            found = [BatchBudget(*shape, shape.rows, peaks(_full(shape)), setting) for shape in self._shapes]
            found = [entry for entry in found if entry.peak <= self._limit]
            if self._holds(found, peaks):
                return found

    def _divided(self, shapes: Sequence[BatchShape], setting: Implementations) -> list[BatchBudget]:
        """Allotments with several micro-batches a batch, whose gradients are added up."""
        peaks = self._peaks(setting, True)
        while True:
            most = [peaks.rows(shape.source, shape.target, self._limit) for shape in shapes]
            # What is told of one sentence may be a little too much.
            doubtful = [shape for shape, rows in zip(shapes, most, strict=True) if rows == 0]
            self._refuse_unless_one_fits(doubtful, setting, peaks)
            found = []
            for shape, rows in zip(shapes, most, strict=True):
                parts = -(-shape.rows // max(1, min(rows, shape.rows)))
                even = -(-shape.rows // parts)
                peak = peaks(Shape(even, shape.source, shape.target))
                found.append(BatchBudget(*shape, even, peak, setting))
            if self._holds([entry for entry in found if entry.rows > 1], peaks):
                return found

    def _holds(self, entries: Sequence[BatchBudget], peaks: PeakModel) -> bool:
        """Returns True if the predictions hold for the tightest budget and for the longest sentences."""
        if not entries:
            return True
        doubtful = {
            max(entries, key=lambda entry: entry.peak),
            max(entries, key=lambda entry: entry.source * entry.target),
        }
        found = [peaks.check(Shape(entry.rows, entry.source, entry.target)) for entry in doubtful]
        return all(found)

    def _refuse_unless_one_fits(
        self, shapes: Sequence[BatchShape], setting: Implementations, peaks: PeakModel
    ) -> None:
        """Raise InputError if one sentence of some shape does not fit."""
        # The others need no more than one of these.
        largest = [shape for shape in shapes if not any(_exceeds(other, shape) for other in shapes)]
        exact = {shape: self._peak(setting, Shape(1, shape.source, shape.target), True) for shape in largest}
        if not exact or max(exact.values()) <= self._limit:
            return
        worst, needed = max(exact.items(), key=lambda item: item[1])
        advice = f"give training.memory_budget={sufficient_budget(needed)}"
        _, source, target = self._largest
        sides = [
            side
            for side in range(self._width, max(source, target), self._width)
            if peaks.fixed <= self._limit
            and peaks(Shape(1, min(side, source), min(side, target))) <= self._limit
        ]
        if sides and sides[-1] > 1:
            advice += f" or data.max_length={sides[-1] - 1}"
        raise InputError(
            f"training.memory_budget {size_text(self._budget)}: one sentence of the worst bucket, {worst.source} x "
            f"{worst.target}, needs {size_text(needed)}; {advice}"
        )


def _exceeds(one: BatchShape, other: BatchShape) -> bool:
    """Returns True if one shape is larger on a side and not smaller on the other."""
    sides, others = (one.source, one.target), (other.source, other.target)
    return sides != others and one.source >= other.source and one.target >= other.target


def _full(shape: BatchShape) -> Shape:
    return Shape(shape.rows, shape.source, shape.target)


@dataclass(frozen=True)
class _Run:
    """Conditions of a run, besides the shape, that the bytes of its steps depend on; equal if ``key`` is."""

    task: Task = field(compare=False)
    key: str
    device: str
    precision: torch.dtype
    ranks: tuple[Rank, ...]


def estimator(task: Task, device: str, precision: torch.dtype, ranks: Sequence[Rank] = (ALONE,)) -> PeakOf:
    """The peaks of a task's steps; each is estimated once in a process.

    Args:
        task: what is trained.
        device: "cpu" or "cuda".
        precision: of products and feature maps.
        ranks: whose steps they are, of which the one counts that needs the most.
    """
    training = task.recipe.training
    sections = [
        task.recipe.model,
        task.recipe.parallel,
        training.optimizer,
        training.gradient_clipping,
        training.averaging,
    ]
    dumped = [section.model_dump(mode="json") for section in sections]
    others = [training.label_smoothing, training.fixed_param_names, training.fixed_param_strategy]
    key = json.dumps([task.name, *task.sizes, *dumped, *others], sort_keys=True)
    return partial(_peak, _Run(task, key, device, precision, tuple(ranks)))


@cache
def _peak(run: _Run, setting: Implementations, shape: Shape, accumulating: bool) -> int:
    ledgers = [
        estimate_step(
            run.task,
            shape,
            run.device,
            precision=run.precision,
            implementations=setting.traceable(),
            accumulating=accumulating,
            rank=rank,
        )
        for rank in run.ranks
    ]
    return max(map(demand, ledgers))


# ---------------------------------------------------------------------- for a person


def plan_table(plan: MemoryPlan, ranks: int = 1) -> Table:
    """A row for each way in which batches are treated, the one with the highest peak first; of one of so many ranks."""
    groups: dict[tuple[int, Implementations], list[BatchBudget]] = {}
    for entry in plan:
        if entry.batches:
            groups.setdefault((entry.parts, entry.implementations), []).append(entry)
    whose = f", each of {ranks} ranks" if ranks > 1 else ""
    result = Table(title=f"plan for a memory budget of {size_text(plan.budget)}{whose}")
    for column in ("buckets", "largest", "batches an epoch", "sentences an update", "micro-batches"):
        result.add_column(column, justify="right")
    result.add_column("ops")
    result.add_column("predicted peak", justify="right")
    ordered = sorted(groups.items(), key=lambda item: -max(entry.peak for entry in item[1]))
    for (parts, implementations), entries in ordered:
        largest = max(entries, key=lambda entry: entry.source * entry.target)
        result.add_row(
            f"{len(entries):,}",
            f"{largest.source} x {largest.target}",
            f"{sum(entry.batches for entry in entries):,}",
            _range([entry.sentences for entry in entries]),
            str(parts) if parts == 1 else f"{parts} of {_range([entry.rows for entry in entries])}",
            describe(implementations),
            size_text(max(entry.peak for entry in entries)),
        )
    return result


def describe(implementations: Implementations) -> str:
    """Describes what differs from keeping everything, such as "recompute attention, output; stash gates"."""
    by_name: dict[str, list[str]] = {}
    for op, name in implementations._asdict().items():
        if name != "auto" and op != "stash":
            by_name.setdefault(name, []).append(op)
    parts = [f"{name} {', '.join(ops)}" for name, ops in by_name.items()]
    parts += [f"stash {implementations.stash}"] if implementations.stash != "auto" else []
    return "; ".join(parts) or "auto"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
