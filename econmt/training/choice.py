"""Chooses implementations for the ops that a recipe leaves at auto, by measuring at the start of a run.

Implementations differ in rounding, so a resumed run keeps those that it began with, which are saved in its state. With
a memory budget the plan chooses instead (`econmt.budget.run_budget`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from econmt.checkpoint.state import TrainingState
from econmt.config.recipe import OPS, Recipe, Training
from econmt.data.batching.batch import AnyBatch, Batches
from econmt.engine.precision import NAMED, Precision
from econmt.engine.step import TrainingStep
from econmt.errors import InputError
from econmt.model import Implementations
from econmt.tasks.protocol import Shape, Task
from econmt_ops.dispatch.measurements import Measurement, MeasurementRecord, decide
from econmt_ops.dispatch.rule import captured, rule
from econmt_ops.dispatch.session import Session, measuring
from econmt_ops.dispatch.traits import implementations_of

POSITIONS = 6
"""Time steps of the measured batch: steps of long and short sentences take equally long."""

SECONDS = 1.6
"""Seconds for measuring; with the creation of the batch it stays below two seconds."""

SHARE = 0.5
"""Share of the remaining time for one op: later ones, of which the decoder is the slowest, need some as well."""

_WORTH_ITS_MEMORY = 0.15
"""Share of time that the reference must save, since it keeps several times the memory and short batches favour it."""

_LEAST_OPERATIONS = 1e9
"""Least number of operations of the measured batch for which measuring pays; fewer take only milliseconds."""


def frequent_shape(batches: Batches[AnyBatch]) -> Shape:
    """Returns the shape that most rows of an epoch have."""
    frequent = max(batches.shapes(), key=lambda shape: shape.batches * shape.rows)
    return Shape(frequent.rows, frequent.source, frequent.target)


def choose(step: TrainingStep, batches: Batches[AnyBatch], state: TrainingState) -> str:
    """Chooses the implementations that the recipe leaves at auto, on rank 0 for all ranks; returns a message.

    They are those of the beginning of the run, or for a new run the fastest ones measured. Step and state receive them.
    """
    recipe, device = step.task.recipe, step.device

    def choose_on_rank_zero() -> list[Any]:
        refuse_missing(Implementations.of(recipe.ops), device.type)
        chosen = saved_choice(recipe, state.choices, device)
        if chosen is not None:
            return [[*chosen], "as at the beginning of the run"]
        updates = expected_updates(recipe.training, batches.batches_per_epoch)
        carried = step.carried()
        chosen, why = settle(
            step.task, lambda: step.model, frequent_shape(batches), device, step.precision, updates
        )
        step.set_carried(carried)
        return [[*chosen], why]

    names, why = step.communicator.on_rank_zero(choose_on_rank_zero)
    step.implementations = Implementations(*names)
    state.choices = as_saved(step.implementations, device)
    parts = ", ".join(f"{field} {name}" for field, name in step.implementations._asdict().items())
    return f"ops: {parts} ({why})"


def is_worth_measuring(model: nn.Module, shape: Shape) -> bool:
    """Returns True if an update of this model takes long enough for the choice to matter."""
    # Embedding tables are looked up, not multiplied, unless they are the output layer's weight too.
    multiplied = {part.weight for part in model.modules() if isinstance(part, nn.Linear)}
    tables = {part.weight for part in model.modules() if isinstance(part, nn.Embedding)} - multiplied
    size = sum(parameter.numel() for parameter in model.parameters() if parameter not in tables)
    positions = min(max(shape.source, shape.target), POSITIONS)
    return 6.0 * size * shape.rows * positions >= _LEAST_OPERATIONS


def measure(
    task: Task,
    model: nn.Module,
    shape: Shape,
    precision: Precision,
    *,
    seconds: float = SECONDS,
    compiled: bool = False,
    byte_limit: int | None = None,
) -> Session:
    """Times the candidates of every op that a recipe leaves at auto, on random ids of at most `POSITIONS` positions.

    Args:
        task: Task that is learnt; its recipe names implementations.
        model: Model in training mode, on the device.
        shape: Most frequent shape of the batches.
        seconds, compiled, byte_limit: See `econmt_ops.dispatch.session.measuring`.
    """
    shape = Shape(shape.rows, min(shape.source, POSITIONS), min(shape.target, POSITIONS))
    of_recipe = Implementations.of(task.recipe.ops)
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), precision.products(device), precision.autocast(device):
        batch = task.example(shape).to(device)
        with measuring(seconds, byte_limit=byte_limit, compiled=compiled, share=SHARE) as session:
            task.loss(model, batch, of_recipe)
    return session


def settle(
    task: Task,
    model: Callable[[], nn.Module],
    shape: Shape,
    device: torch.device,
    precision: Precision,
    updates: float = 0.0,
    passes: int = 1,
) -> tuple[Implementations, str]:
    """Chooses an implementation for every op that a recipe leaves at auto, as a run does when it begins.

    Measurements are cached, so that a run and a prediction of its memory choose alike.

    Args:
        model: Returns the model on the device; called only if measuring may pay.
        shape: Most frequent shape of the batches.
        updates: Least number of updates of the run.
        passes: Largest number of measurements of :data:`SECONDS` each; another follows only if one was incomplete.

    Returns:
        The implementations, and the reason for them.
    """
    training, of_recipe = task.recipe.training, Implementations.of(task.recipe.ops)
    in_graphs = device.type == "cuda" and training.in_graphs
    measured: list[Measurement] = []
    if "auto" not in of_recipe:
        why = "set by the recipe"
    elif in_graphs:
        why = "default for CUDA graphs"
    elif is_worth_measuring(built := model().train(), shape):
        seconds = 0.0
        for _ in range(passes):
            session = measure(task, built, shape, precision)
            measured, seconds = list(session.measurements.values()), seconds + session.seconds
            if session.seconds == 0.0:
                break
        why = f"measured in {seconds:.1f} s"
    else:
        why = "default; the model is too small to measure"
    with captured(in_graphs):
        chosen = choose_implementations(
            of_recipe,
            measured,
            device=device.type,
            precision=precision,
            updates=updates,
            positions=max(shape.source, shape.target),
        )
    return chosen, why


def choose_implementations(
    of_recipe: Implementations,
    measurements: Iterable[Measurement],
    *,
    device: str = "cpu",
    precision: Precision = NAMED["float32"],
    updates: float = 0.0,
    positions: int = 1,
) -> Implementations:
    """Chooses an implementation for every op that is left at auto.

    Args:
        measurements: Measurements of the model's ops; where there are none, the default holds.
        device, precision: Device type, and precision of the products.
        updates: Least number of updates of the run, in which "compiled" must save more time than compiling takes.
        positions: Positions of an average batch, of which `POSITIONS` were measured.
    """
    known = list(measurements)
    chosen, updates = {}, updates * max(1.0, positions / POSITIONS)
    for key, functions in OPS.items():
        if getattr(of_recipe, key) == "auto":
            relevant = [measurement for measurement in known if measurement.op in functions]
            # Without input feeding, a decoder's layers call the same op as the encoder's.
            if key == "decoder" and not relevant:
                relevant = [measurement for measurement in known if measurement.op in OPS["encoder"]]
            chosen[key] = _fastest(relevant, updates, device) or rule(functions[0], device)
    settled = of_recipe._replace(**chosen)
    # A named implementation keeps its own stash, and there is one stash level for all ops.
    named = filter(None, map(of_recipe.traits, ("encoder", "decoder")))
    decoder = settled.traits("decoder")
    if of_recipe.stash == "auto" and not any(traits.takes_stash for traits in named) and decoder is not None:
        with precision.products(torch.device(device)):
            settled = settled._replace(stash=decoder.stash_in_model(precision.dtype))
    return settled


def refuse_missing(of_recipe: Implementations, device: str) -> None:
    """Checks that a machine can run the implementations that a recipe names.

    Raises:
        InputError: The machine cannot run one of them; the message names the available ones.
    """
    for key, functions in OPS.items():
        name, candidates = getattr(of_recipe, key), implementations_of(functions[0])
        available = [
            candidate.name
            for candidate in candidates.values()
            if device in candidate.traits.devices and candidate.traits.is_available()
        ]
        if name != "auto" and name not in available:
            raise InputError(
                f"ops.{key}={name}: cannot run on this machine's {device}; use one of auto, {', '.join(available)}"
            )


def _fastest(measurements: list[Measurement], times: float, device: str) -> str | None:
    """Returns the fastest implementation over ``times`` repetitions of an op's calls; None if nothing was measured."""
    totals: dict[str, MeasurementRecord] = {}
    for number, measurement in enumerate(measurements):
        by_name = {label.partition("/")[0]: record for label, record in measurement.records.items()}
        if number and not totals:
            return None
        totals = {
            name: _sum(totals.get(name), record, measurement.calls)
            for name, record in by_name.items()
            if number == 0 or name in totals
        }
    if not totals:
        return None
    # Not the default for the measured shape, which is smaller than the run's shapes.
    default = rule(measurements[0].op, device)
    if default not in totals:
        return None
    known = implementations_of(measurements[0].op)
    ready = [record.milliseconds for name, record in totals.items() if not known[name].traits.warms_up]
    for name in [name for name in totals if known[name].traits.warms_up]:
        gained = (min(ready) - totals[name].milliseconds) * 1e-3 * times
        if gained <= totals[name].first_seconds:
            del totals[name]
    best = decide(totals, default)
    keeps_more = known[default].traits.recomputes and not known[best].traits.recomputes
    if keeps_more and totals[best].milliseconds > (1 - _WORTH_ITS_MEMORY) * totals[default].milliseconds:
        return default
    return best


def _sum(total: MeasurementRecord | None, record: MeasurementRecord, calls: int) -> MeasurementRecord:
    before = total or MeasurementRecord(0.0, 0.0, 0.0, 0, 0.0)
    return MeasurementRecord(
        before.milliseconds + calls * record.milliseconds,
        before.low + calls * record.low,
        before.high + calls * record.high,
        before.bytes + calls * record.bytes,
        before.first_seconds + record.first_seconds,
    )


def expected_updates(training: Training, batches_per_epoch: int) -> float:
    """Returns the least number of updates of a run, as far as its recipe determines it."""
    an_epoch = batches_per_epoch / training.update_interval
    limits = [float(training.max_updates or 0), (training.max_epochs or 0) * an_epoch]
    known = [limit for limit in limits if limit]
    patience = training.early_stopping.max_num_checkpoint_not_improved
    if patience is not None:
        known.append(float(patience * training.checkpoint_interval))
    return min(known, default=0.0)


def saved_choice(recipe: Recipe, saved: Mapping[str, str], device: torch.device) -> Implementations | None:
    """Returns the implementations that a run began with; None if it began on another type of device, or saved none.

    ``saved`` is a result of :func:`as_saved`; implementations that the recipe names take precedence.
    """
    of_recipe = Implementations.of(recipe.ops)
    names = dict(saved)
    if names.pop("device", None) != device.type or names.keys() != set(Implementations._fields):
        return None
    return of_recipe._replace(
        **{field: names[field] for field, name in of_recipe._asdict().items() if name == "auto"}
    )


def as_saved(implementations: Implementations, device: torch.device) -> dict[str, str]:
    """Returns the form of a choice that a state saves."""
    return {"device": device.type, **implementations._asdict()}
