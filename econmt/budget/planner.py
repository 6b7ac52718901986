"""Plans a run with a memory budget: implementations and rows of a micro-batch for each shape of batches.

A batch that does not fit even with the leanest implementations is divided into micro-batches, whose gradients are added
up to those of the whole batch. The plan is made before training from estimates
(:mod:`econmt.estimate.training_step`), and corrected if the device runs out of memory nevertheless.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.table import Table

from econmt.budget.peaks import PeakModel
from econmt.data.batching.batch import AnyBatch, BatchShape
from econmt.engine.precision import Precision
from econmt.errors import InputError
from econmt.estimate.byte_budget import nearest_budget, size_text
from econmt.estimate.fit import demand
from econmt.estimate.training_step import estimate_step
from econmt.model import Implementations
from econmt.parallel.simulated_rank import ALONE, Rank
from econmt.tasks.protocol import Shape, Task
from econmt_memory.report.tables import ReportTable
from econmt_ops.dispatch.device_limits import limits_of

RESERVE = 0.03
"""Share of a budget that predictions must leave free, for their errors."""

PeakOf = Callable[[Implementations, Shape, bool], int]
"""Returns the bytes of a training step; the last argument is True if it adds to existing gradients."""


def usable(budget: int) -> int:
    """Returns the bytes of a budget that predictions may use."""
    return int((1.0 - RESERVE) * budget)


def sufficient_budget(size: int, outside: int = 0) -> str:
    """Returns a budget, as a recipe has it, of which ``size`` bytes are usable, beside those ``outside``."""
    return nearest_budget(math.ceil((size + 1) / (1.0 - RESERVE)) + 1 + outside)


def beside(outside: int) -> str:
    """Returns the part of an error message that tells what else a budget has to hold; empty on a CPU."""
    return f", beside {size_text(outside)} outside of PyTorch's allocator" if outside else ""


class BatchBudget(NamedTuple):
    """Treatment of the batches of one padded shape.

    Attributes:
        source, target: Padded positions.
        sentences: Most rows of a batch.
        batches: Number of batches per epoch; 0 for a shape that occurs only in validation.
        rows: Most rows of a micro-batch.
        peak: Predicted bytes of its step.
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
        """Number of micro-batches of a batch."""
        return -(-self.sentences // self.rows)


class MemoryPlan:
    """Treatment of the batches of all shapes of a run within ``budget`` bytes.

    Validation translates ``decoding_rows`` sentences together. ``whole`` is the memory budget, as a recipe has it, with
    which no batch is divided; it is empty in a plan that divides none and in one for the budget "auto".
    """

    def __init__(
        self, budget: int, allotments: Iterable[BatchBudget], decoding_rows: int, whole: str = ""
    ) -> None:
        self.budget = budget
        self.decoding_rows = decoding_rows
        self.whole = whole
        self._by_shape = {(entry.source, entry.target): entry for entry in allotments}

    def __iter__(self) -> Iterator[BatchBudget]:
        return iter(self._by_shape.values())

    @property
    def worst(self) -> BatchBudget:
        """Budget of the training shape with the highest predicted peak."""
        trained = [entry for entry in self if entry.batches]
        return max(trained, key=lambda entry: (entry.peak, entry.rows * entry.source * entry.target))

    @property
    def divides(self) -> bool:
        """True if batches of some training shape are divided into micro-batches."""
        return any(entry.parts > 1 for entry in self if entry.batches)

    def find(self, batch: AnyBatch) -> BatchBudget:
        """Returns the treatment of a batch: that of its shape or, if there is none, one derived from the others."""
        rows, (source, target) = len(batch.indices), batch.positions
        exact = self._by_shape.get((source, target))
        if exact is not None:
            return exact
        derived = [_adapt(entry, rows, source, target) for entry in self]
        return max(derived, key=lambda entry: (entry.rows, -entry.peak))

    def halve(self, entry: BatchBudget, rows: int) -> BatchBudget:
        """Halves the micro-batches of a shape after ``rows`` >= 2 rows ran out of memory; returns the new treatment."""
        smaller = entry._replace(rows=-(-rows // 2))
        self._by_shape[entry.source, entry.target] = smaller
        return smaller

    def state_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        rows = [[*entry[:-1], *entry.implementations] for entry in self]
        return {
            "budget": self.budget,
            "decoding_rows": self.decoding_rows,
            "allotments": rows,
            "whole": self.whole,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> MemoryPlan:
        """Returns the plan from the result of :meth:`state_dict`."""
        count = len(BatchBudget._fields) - 1
        rows = state["allotments"]
        entries = [BatchBudget._make([*row[:count], Implementations(*row[count:])]) for row in rows]
        return cls(state["budget"], entries, state["decoding_rows"], state.get("whole", ""))


def _adapt(entry: BatchBudget, rows: int, source: int, target: int) -> BatchBudget:
    """Derives the treatment of another shape.

    Every term of a step's bytes has the rows as a factor and each kind of positions at most once. So a shape with n
    times the positions needs no more bytes with 1/n of the rows.
    """
    positions = max(source, entry.source) * max(target, entry.target)
    most = entry.rows * entry.source * entry.target // positions
    return entry._replace(
        source=source, target=target, sentences=rows, batches=0, rows=max(1, min(rows, most))
    )


@dataclass
class Planner:
    """Finds the fastest setting that fits for each shape, and divides batches that fit with none.

    Attributes:
        settings: Settings to choose from, fastest first, each keeping less than the one before; see
            :func:`econmt.budget.prices.settings`.
        budget: Bytes for tensors.
        accumulating: True if every update adds up several batches.
        width: Width of the buckets.
        persists: True if gradients outlive updates where some batches are divided, as those of CUDA graphs do. All
            batches then add to existing gradients.
        outside: Bytes of the recipe's memory budget that are not for tensors.
    """

    shapes: Sequence[BatchShape]
    settings: Sequence[Implementations]
    budget: int
    peak: PeakOf
    accumulating: bool
    width: int
    persists: bool = False
    outside: int = 0

    def __post_init__(self) -> None:
        self._limit = usable(self.budget)
        self._several = self.accumulating
        self._largest = Shape(*(max(shape[field] for shape in self.shapes) for field in (2, 0, 1)))

    def allot(self) -> list[BatchBudget]:
        """Returns the treatment of each shape: the fastest of the tried settings with which whole batches fit.

        It tries the first and the last setting, those of a bisection for the fastest one that suits all shapes, and the
        middle one if none suits all.

        Raises:
            InputError: One sentence of the largest shape does not fit.
        """
        chosen: dict[tuple[int, int], tuple[int, BatchBudget]] = {}
        leanest = self._peaks(self.settings[-1], True)
        if leanest.fixed > self._limit:  # reported after two small estimates
            self._refuse_unless_one_fits(self.shapes, self.settings[-1], leanest)

        def suits_all(index: int) -> bool:
            entries = self._whole(self.settings[index])
            for entry in entries:
                shape = entry.source, entry.target
                chosen[shape] = min((index, entry), chosen.get(shape, (index, entry)))
            return len(entries) == len(self.shapes)

        fails, fits = 0, len(self.settings) - 1
        if not suits_all(fails) and fits > fails:
            if suits_all(fits):
                while fits - fails > 1:
                    middle = (fails + fits) // 2
                    fails, fits = (fails, middle) if suits_all(middle) else (middle, fits)
            elif fits > 1:
                suits_all(fits // 2)
        too_large = [shape for shape in self.shapes if (shape.source, shape.target) not in chosen]
        entries = [entry for _, entry in chosen.values()]
        if too_large and self.persists and not self.accumulating:
            self.accumulating = True
            return self.allot()
        entries += self._divided(too_large, self.settings[-1]) if too_large else []
        return sorted(entries, key=lambda entry: (entry.target, entry.source))

    def budget_of_whole_batches(self) -> str:
        """Returns a memory budget, as a recipe has it, with which the leanest setting divides no batch."""
        peaks = self._peaks(self.settings[-1], self._several)
        while True:
            entries = self._undivided(self.settings[-1], peaks)
            if self._holds(entries, peaks):
                return sufficient_budget(max(entry.peak for entry in entries), self.outside)

    def _peaks(self, setting: Implementations, accumulating: bool) -> PeakModel:
        return PeakModel(lambda shape: self.peak(setting, shape, accumulating), self._largest)

    def _whole(self, setting: Implementations) -> list[BatchBudget]:
        """Returns the treatment of the shapes whose whole batches fit."""
        peaks = self._peaks(setting, self.accumulating)
        if peaks.fixed > self._limit:
            return []
        if peaks.most <= self._limit:
            return [BatchBudget(*shape, shape.rows, peaks.most, setting) for shape in self.shapes]
        while True:
            entries = [entry for entry in self._undivided(setting, peaks) if entry.peak <= self._limit]
            if self._holds(entries, peaks):
                return entries

    def _undivided(self, setting: Implementations, peaks: PeakModel) -> list[BatchBudget]:
        return [
            BatchBudget(*shape, shape.rows, peaks(Shape(shape.rows, *shape[:2])), setting)
            for shape in self.shapes
        ]

    def _divided(self, shapes: Sequence[BatchShape], setting: Implementations) -> list[BatchBudget]:
        """Returns the treatment of shapes whose batches are divided into micro-batches."""
        peaks = self._peaks(setting, True)
        while True:
            most = [peaks.rows(shape.source, shape.target, self._limit) for shape in shapes]
            # The bound for one sentence may be slightly too high.
            doubtful = [shape for shape, rows in zip(shapes, most, strict=True) if rows == 0]
            self._refuse_unless_one_fits(doubtful, setting, peaks)
            entries = []
            for shape, rows in zip(shapes, most, strict=True):
                parts = -(-shape.rows // max(1, min(rows, shape.rows)))
                even = -(-shape.rows // parts)
                peak = peaks(Shape(even, shape.source, shape.target))
                entries.append(BatchBudget(*shape, even, peak, setting))
            if self._holds([entry for entry in entries if entry.rows > 1], peaks):
                return entries

    def _holds(self, entries: Sequence[BatchBudget], peaks: PeakModel) -> bool:
        """Returns True if the predictions hold for the tightest budget and for the longest sentences."""
        if not entries:
            return True
        doubtful = {
            max(entries, key=lambda entry: entry.peak),
            max(entries, key=lambda entry: entry.source * entry.target),
        }
        held = [peaks.check(Shape(entry.rows, entry.source, entry.target)) for entry in doubtful]
        return all(held)  # each check may raise the bounds

    def _refuse_unless_one_fits(
        self, shapes: Sequence[BatchShape], setting: Implementations, peaks: PeakModel
    ) -> None:
        """Raises InputError if one sentence of some shape does not fit."""
        # No other shape needs more than one of these.
        largest = [shape for shape in shapes if not any(_exceeds(other, shape) for other in shapes)]
        exact = {shape: self.peak(setting, Shape(1, shape.source, shape.target), True) for shape in largest}
        if not exact or max(exact.values()) <= self._limit:
            return
        worst, needed = max(exact.items(), key=lambda item: item[1])
        advice = f"set training.memory_budget={sufficient_budget(needed, self.outside)}"
        _, source, target = self._largest
        sides = [
            side
            for side in range(self.width, max(source, target), self.width)
            if peaks.fixed <= self._limit
            and peaks(Shape(1, min(side, source), min(side, target))) <= self._limit
        ]
        if sides and sides[-1] > 1:
            advice += f" or data.max_length={sides[-1] - 1}"
        raise InputError(
            f"training.memory_budget {size_text(self.budget + self.outside)}: one sentence of the worst bucket, "
            f"{worst.source} x {worst.target}, needs {size_text(needed)}{beside(self.outside)}; {advice}"
        )


def _exceeds(one: BatchShape, other: BatchShape) -> bool:
    """Returns True if one shape is larger on a side and not smaller on the other."""
    sides, others = (one.source, one.target), (other.source, other.target)
    return sides != others and one.source >= other.source and one.target >= other.target


_PEAKS: dict[tuple[Any, ...], int] = {}
"""Estimated peaks, by everything that they depend on."""


def estimator(task: Task, device: str, precision: Precision, ranks: Sequence[Rank] = (ALONE,)) -> PeakOf:
    """Returns a function that estimates the bytes of a task's steps; each estimate is made once in a process.

    Of the ``ranks``, the one that needs most counts.
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
    others = [
        training.label_smoothing,
        training.activation_regularization,
        training.temporal_activation_regularization,
        training.fixed_param_names,
        training.optimizer_in_backward,
        training.param_dtype,
        training.in_graphs,
    ]
    key = json.dumps([task.name, *task.sizes, *dumped, *others], sort_keys=True)

    def peak(setting: Implementations, shape: Shape, accumulating: bool) -> int:
        limits = limits_of(torch.device(device))
        conditions = key, device, limits, precision.name, tuple(ranks), setting, shape, accumulating
        if conditions not in _PEAKS:
            ledgers = [
                estimate_step(
                    task,
                    shape,
                    device,
                    precision=precision,
                    implementations=setting.traceable(),
                    accumulating=accumulating,
                    rank=rank,
                )
                for rank in ranks
            ]
            _PEAKS[conditions] = max(map(demand, ledgers))
        return _PEAKS[conditions]

    return peak


def plan_table(plan: MemoryPlan, ranks: int = 1) -> Table:
    """Returns a table with a row for each treatment of batches, the highest peak first, for each of ``ranks`` ranks."""
    groups: dict[tuple[int, Implementations], list[BatchBudget]] = {}
    for entry in plan:
        if entry.batches:
            groups.setdefault((entry.parts, entry.implementations), []).append(entry)
    whose = f", each of {ranks} ranks" if ranks > 1 else ""
    undivided = f" (training.memory_budget={plan.whole} divides no batch)" if plan.whole else ""
    title = f"plan for a memory budget of {size_text(plan.budget)}{whose}{undivided}"
    columns = ["buckets", "largest", "batches an epoch", "sentences an update", "micro-batches", "ops"]
    rows = []
    ordered = sorted(groups.items(), key=lambda item: -max(entry.peak for entry in item[1]))
    for (parts, implementations), entries in ordered:
        largest = max(entries, key=lambda entry: entry.source * entry.target)
        cells = [f"{len(entries):,}", f"{largest.source} x {largest.target}"]
        cells += [
            f"{sum(entry.batches for entry in entries):,}",
            _range([entry.sentences for entry in entries]),
        ]
        cells += [str(parts) if parts == 1 else f"{parts} of {_range([entry.rows for entry in entries])}"]
        rows.append([*cells, describe(implementations), size_text(max(entry.peak for entry in entries))])
    return ReportTable(title, [*columns, "predicted peak"], rows, left=(5,)).for_terminal()


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
