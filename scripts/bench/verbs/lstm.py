"""``python -m scripts.bench lstm``: schedules of an LSTM stack against each other and against torch.nn.LSTM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import typer

from econmt.bench.rows import Row
from econmt.cli.measuring import BenchSession, Dtypes, Seconds, dtypes_of
from econmt.cli.option_groups import option, with_option_groups
from econmt.cli.options import refuse_idle
from econmt.config import limits
from econmt.errors import InputError
from scripts.bench import lstm_schedules

LAYERS, STEPS, HIDDEN, BATCH = lstm_schedules.PUBLISHED


@dataclass(frozen=True)
class StackOptions:
    """Sizes of a stack of LSTM layers."""

    layers: int = option(LAYERS, help="Of the stack.", min=1, max=limits.LAYERS)
    steps: int = option(STEPS, help="Of a sequence.", min=1, max=limits.POSITIONS)
    hidden: int = option(HIDDEN, help="Units of a layer.", min=1, max=limits.WIDTH)


@with_option_groups
def lstm_command(
    context: typer.Context,
    *,
    ablation: bool = option(False, help="Each decision of the schedule; else batches up to the peak."),
    compile_loop: bool = option(
        False, help="Also torch.compile of a plain loop: about a second a step to compile."
    ),
    schedules: list[str] | None = option(
        None, "--schedule", help="With --ablation: only names that contain this; may be repeated."
    ),
    sizes: StackOptions,
    batches: list[int] | None = option(
        None,
        "--batch",
        help="Sequences: one with --ablation (64), else may be repeated.",
        min=1,
        max=limits.BATCH,
    ),
    dtypes: Dtypes = ["float32", "bfloat16"],  # noqa: B006  typer copies it
    samples: int = option(5, help="Timed calls of each; the quickest counts.", min=1, max=limits.REPETITIONS),
    limit: Seconds = option(600.0, help="Seconds after which no batch is begun, without --ablation."),
    session: BenchSession,
) -> None:
    """Time a stack of LSTM layers, forward and backward, under different schedules and against torch.nn.LSTM.

    Without --ablation: operations a second against the batch. Batches that the file of --csv has already are left out
    and drawn from there.

    \b
    Example:
      python -m scripts.bench lstm --ablation
      python -m scripts.bench lstm --ablation --schedule torch.
      python -m scripts.bench lstm --ablation --dtype bfloat16 --csv lstm.csv
      python -m scripts.bench lstm --csv rates.csv --limit 60 --plot rates.png
    """
    if ablation and len(batches or [1]) != 1:
        raise InputError("--batch: give one with --ablation")
    if not ablation:
        why = "is for --ablation; give that, or leave it out"
        refuse_idle(context, why, "compile_loop", "schedules")
    else:
        refuse_idle(context, "is for batches up to the peak, without --ablation; leave it out", "limit")
    types = dtypes_of(dtypes)
    shape = lstm_schedules.StackShape(sizes.layers, sizes.steps, sizes.hidden, (batches or [BATCH])[0])
    title = f"LSTM: {shape.layers} layers, {shape.steps} steps, {shape.hidden} units"
    if ablation:
        _lstm_ablation(session, shape, types, samples, compile_loop, schedules or (), title)
    else:
        _lstm_rates(session, shape, types, samples, batches, limit, title)


_LSTM_TIMES = ("forward, ms", "forward and backward, ms")


def _lstm_ablation(
    session: BenchSession,
    shape: lstm_schedules.StackShape,
    types: Sequence[torch.dtype],
    samples: int,
    compile_loop: bool,
    only: Sequence[str],
    title: str,
) -> None:
    with session.measuring() as say:
        found = lstm_schedules.ablation(
            *(shape, types, session.device, say),
            samples=samples,
            compile_loop=compile_loop,
            only=only,
        )
        rows = session.kept(found)
    gains = ("forward, gain", "published gain", "forward and backward, gain", "forward and backward, GFLOP/s")
    columns = ("dtype", "schedule", *_LSTM_TIMES, *gains, "peak bytes", "first call, s")
    title += f", batch {shape.batch}"
    session.print(rows, columns, title)
    session.draw(rows, label=("dtype", "schedule"), value=_LSTM_TIMES[1], title=title)


def _lstm_rates(
    session: BenchSession,
    shape: lstm_schedules.StackShape,
    types: Sequence[torch.dtype],
    samples: int,
    batches: Sequence[int] | None,
    limit: float,
    title: str,
) -> None:
    fixed: Row = {"layers": shape.layers, "steps": shape.steps, "hidden": shape.hidden}
    before = session.rows_before({"bench": "lstm-rates", **fixed})
    done = {(row["dtype"], int(row["batch"])) for row in before}
    with session.measuring() as say:
        rows = session.kept(
            lstm_schedules.rates(
                shape, types, session.device, say, samples=samples, batches=batches, limit=limit, done=done
            )
        )
    rate = "forward and backward, GFLOP/s"
    session.print(rows, ("dtype", "schedule", "batch", *_LSTM_TIMES, rate, "peak GFLOP/s"), title)
    everything: list[Mapping[str, str | int | float]] = [*before, *rows]
    if session.plot is not None and everything:
        lstm_schedules.draw_rates(everything, session.plot)
