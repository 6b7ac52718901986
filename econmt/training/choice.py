"""Choice of implementations for ops that the recipe leaves at auto: measured when the run starts, then kept.

Implementations differ by rounding, so a run that goes on must use those that it began with: they are a part of its
saved state. With a byte budget the plan chooses instead (`econmt.training.budget`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from econmt.config.recipe import OPS, Recipe, Training, rename_ops
from econmt.engine.precision import Precision
from econmt.errors import InputError
from econmt.model import Implementations
from econmt.tasks.protocol import Shape, Task
from econmt_ops.dispatch.measurements import Measurement, MeasurementRecord, decide
from econmt_ops.dispatch.rule import captured, rule
from econmt_ops.dispatch.session import Session, measuring
from econmt_ops.dispatch.traits import implementations_of

POSITIONS = 6
"""Positions of the batch that is measured: a step of a long sentence takes as long as one of a short one."""

SECONDS = 1.6
"""Seconds that measuring may take; with the batch itself it stays under two seconds."""

SHARE = 0.5
"""Share of the remaining time that one op may take; later ops, the slowest of which is the decoder, need some too."""

_WORTH_ITS_MEMORY = 0.15
"""By which share the reference must be faster: it keeps several times as much, and so few positions flatter it."""

_LEAST_OPERATIONS = 1e9
"""Below this many operations in the measured batch there is nothing to gain: it takes milliseconds."""


def is_worth_measuring(model: nn.Module, shape: Shape) -> bool:
    """Returns True if an update of this model takes long enough for the choice to matter."""
    # Rows of a table are looked up, unless it is an output layer's weight too.
    multiplied = {part.weight for part in model.modules() if isinstance(part, nn.Linear)}
    tables = {part.weight for part in model.modules() if isinstance(part, nn.Embedding)} - multiplied
    size = sum(parameter.numel() for parameter in model.parameters() if parameter not in tables)
    positions = min(max(shape.source, shape.target), POSITIONS)
    return 6.0 * size * shape.rows * positions >= _LEAST_OPERATIONS


def measure(
    task: Task,
    model: nn.Module,
    shape: Shape,
    device: torch.device,
    precision: Precision,
    *,
    seconds: float = SECONDS,
    compiled: bool = False,
    byte_limit: int | None = None,
    remember: bool = True,
) -> Session:
    """Times the candidates of every op that a recipe leaves at auto, on random ids of at most `POSITIONS` positions.

    Args:
        task: what is learnt; its recipe names implementations.
        model: in training mode.
        shape: of the batches that are most frequent.
        device, precision: where and how products are computed.
        seconds, compiled, byte_limit, remember: see `econmt_ops.dispatch.session.measuring`.
    """
    shape = Shape(shape.rows, min(shape.source, POSITIONS), min(shape.target, POSITIONS))
    given = Implementations.of(task.recipe.ops)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), precision.products(device), precision.autocast(device):
        batch = task.example(shape).to(device)
        with measuring(
            seconds, byte_limit=byte_limit, compiled=compiled, remember=remember, share=SHARE
        ) as session:
            task.loss(model, batch, given)
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
    """Names an implementation for everything that a recipe leaves at auto, as a run does when it begins.

    What is measured is remembered, so that a run and a prediction of its memory choose alike.

    Args:
        task: what is learnt.
        model: gives the model on the device; called only if measuring may pay.
        shape: of the batches that are most frequent.
        device: device that computes.
        precision: precision of products.
        updates: least number of updates of the run.
        passes: most measurements, of :data:`SECONDS` each; another is made only if one has left something out.

    Returns:
        The implementations, and why it is these.
    """
    training, given = task.recipe.training, Implementations.of(task.recipe.ops)
    in_graphs = device.type == "cuda" and training.in_graphs
    found: list[Measurement] = []
    if "auto" not in given:
        why = "as the recipe says"
    elif in_graphs:
        why = "by the rule for steps in CUDA graphs"
    elif is_worth_measuring(made := model().train(), shape):
        seconds = 0.0
        for _ in range(passes):
            session = measure(task, made, shape, device, precision)
            found, seconds = list(session.measurements.values()), seconds + session.seconds
            if session.seconds == 0.0:
                break
        why = f"measured in {seconds:.1f} s"
    else:
        why = "by the rule: too small to measure"
    positions = max(shape.source, shape.target)
    with captured(in_graphs):
        chosen = choose_implementations(
            given,
            found,
            device=device.type,
            updates=updates,
            positions=positions / min(positions, POSITIONS),
        )
    return chosen, why


def choose_implementations(
    given: Implementations,
    measurements: Iterable[Measurement],
    *,
    device: str = "cpu",
    updates: float = 0.0,
    positions: float = 1.0,
) -> Implementations:
    """Names an implementation for everything that is left at auto.

    Args:
        given: the recipe's.
        measurements: of the model's ops; where there are none the rule holds.
        device: the type of device whose rule that is.
        updates: how many the run will have at least: "compiled" must save more time in them than compiling takes.
        positions: positions of an average batch by those of the measured one.
    """
    found = list(measurements)
    chosen = {}
    for key, functions in OPS.items():
        if getattr(given, key) == "auto":
            mine = [measurement for measurement in found if measurement.op in functions]
            # Without input feeding a decoder's layers are to an op what the encoder's are.
            if key == "decoder" and not mine:
                mine = [measurement for measurement in found if measurement.op in OPS["encoder"]]
            chosen[key] = _fastest(mine, updates * positions, device) or rule(functions[0], device)
    settled = given._replace(**chosen)
    # An implementation that is named keeps what it keeps by itself, and there is one level for all.
    named = filter(None, map(given.traits, ("encoder", "decoder")))
    decoder = settled.traits("decoder")
    if given.stash == "auto" and not any(traits.takes_stash for traits in named) and decoder is not None:
        settled = settled._replace(stash=decoder.model_stash)
    return settled


def refuse_missing(given: Implementations, device: str) -> None:
    """Makes sure that a machine can run what a recipe names.

    Args:
        given: the recipe's.
        device: the type of device on which it is to run.

    Raises:
        InputError: it cannot; the message names what it can run.
    """
    for key, functions in OPS.items():
        name, found = getattr(given, key), implementations_of(functions[0])
        able = [
            each.name
            for each in found.values()
            if device in each.traits.devices and each.traits.is_available()
        ]
        if name != "auto" and name not in able:
            raise InputError(
                f"ops.{key}={name}: cannot run on this machine's {device}; give one of auto, {', '.join(able)}"
            )


def _fastest(measurements: list[Measurement], times: float, device: str) -> str | None:
    """The implementation that is fastest over all calls of an op's problems; None if nothing was measured.

    Args:
        measurements: of ops of one kind.
        times: how often the measured calls will be repeated.
        device: the type of device on which they were measured.
    """
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
    # Not the rule of the measured shape, which is smaller than those of the run.
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


def expected_updates(training: Training, batches_per_epoch: int, tokens_per_epoch: int) -> float:
    """Returns a lower bound of the updates of a run, as far as its recipe determines it."""
    an_epoch = batches_per_epoch / training.update_interval
    limits = [float(training.max_updates or 0), (training.max_epochs or 0) * an_epoch]
    limits.append((training.max_tokens or 0) / max(1, tokens_per_epoch) * an_epoch)
    known = [limit for limit in limits if limit]
    patience = training.early_stopping.max_num_checkpoint_not_improved
    if patience is not None:
        known.append(float(patience * training.checkpoint_interval))
    return min(known, default=0.0)


def saved_choice(recipe: Recipe, saved: Mapping[str, str], device: torch.device) -> Implementations | None:
    """The implementations that a run began with; None if it was on another kind of device, or none are saved.

    Args:
        recipe: whose named implementations go before the saved ones.
        saved: what :func:`as_saved` made.
        device: on which it goes on.
    """
    given = Implementations.of(recipe.ops)
    names = dict(saved)
    if "lstm" in names:  # of a run that an older version began
        names.setdefault("decoder", names.get("attention", "auto"))
        rename_ops(names, recipe.translation_model.decoder.input_feeding)
    if names.pop("device", None) != device.type or names.keys() != set(Implementations._fields):
        return None
    return given._replace(
        **{field: names[field] for field, name in given._asdict().items() if name == "auto"}
    )


def as_saved(implementations: Implementations, device: torch.device) -> dict[str, str]:
    """Returns the part of a choice that is saved with the training state."""
    return {"device": device.type, **implementations._asdict()}
