"""Measures what "auto" chooses: the time of each candidate for a recipe's ops."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from econmt.bench.rows import Row
from econmt.engine.precision import Precision
from econmt.model import Implementations
from econmt.tasks.protocol import Shape, Task
from econmt.training.choice import choose_implementations, measure
from econmt_ops.dispatch.measurements import Measurement
from econmt_ops.dispatch.session import Session


def choose(
    task: Task,
    shape: Shape,
    device: torch.device,
    precision: Precision,
    *,
    seconds: float,
    compiled: bool,
    byte_limit: int | None,
    updates: float,
) -> tuple[Session, Implementations]:
    """Measures the ops that a recipe leaves at auto, as a run does at its start, and caches the figures for runs.

    Args:
        task, shape: the recipe's task, and shape of its batches.
        device, precision: device and precision of products.
        seconds: maximum time for measuring.
        compiled: True to include compiled candidates, which takes long.
        byte_limit: maximum bytes of an op's stash; None: no limit.
        updates: number of updates of the run, in which compiling must pay.

    Returns:
        The session with the measurements, and the implementations that a run would use.
    """
    model = task.build_model().to(device).train()
    session = measure(
        task, model, shape, precision, seconds=seconds, compiled=compiled, byte_limit=byte_limit
    )
    chosen = choose_implementations(
        Implementations.of(task.recipe.ops),
        list(session.measurements.values()),
        device=device.type,
        precision=precision,
        updates=updates,
        positions=max(shape.source, shape.target),
    )
    return session, chosen


def rows_of(measurements: Iterable[Measurement], byte_limit: int | None = None) -> list[Row]:
    """Makes a row for every candidate of every op."""
    rows: list[Row] = []
    for measurement in measurements:
        choice = measurement.choice(byte_limit)
        for name, record in sorted(measurement.records.items(), key=lambda item: item[1].milliseconds):
            marks = {"chosen": name == choice, " (rule)": name == measurement.rule}
            rows.append(
                {
                    "bench": "select",
                    "problem": measurement.key,
                    "calls": measurement.calls,
                    "candidate": name,
                    "milliseconds": record.milliseconds,
                    "lowest decile": record.low,
                    "highest decile": record.high,
                    "bytes kept": record.bytes,
                    "first call, s": record.first_seconds,
                    "chosen": "".join(mark for mark, applies in marks.items() if applies),
                    "regret": measurement.regret(name),
                }
            )
    return rows
