"""``python -m scripts.bench lstm``: times schedules of an LSTM stack, from eight products a cell to the fastest.

On a GPU times are those of CUDA graphs, so that launches from Python do not count, and there are schedules with a CUDA
stream for each of several products.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

from econmt.bench.rows import Row, Say
from econmt.checkpoint.tensor_files import dtype_name
from econmt.cli.measuring import BenchSession, Dtypes, Seconds, dtypes_of
from econmt.config import limits
from econmt.engine.devices import seconds_of
from econmt.errors import InputError
from econmt.options.option_groups import option, with_option_groups
from econmt.options.shared_options import refuse_idle
from econmt_ops import LSTMWeights
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.dispatch.timing import quantile
from scripts.bench.layers import (
    Call,
    by_torch,
    largest_difference,
    lstm_weights,
    passes,
    peak_bytes,
    replayed,
)
from scripts.bench.lstm_schedules import Stack, own_layers, stages
from scripts.bench.plots import draw_lines

BATCH = 64
"""Batch of the published comparison (Optim-LSTM), whose other sizes are the defaults of :class:`StackShape`."""

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batches of the table of operations a second."""


@dataclass(frozen=True)
class StackShape:
    """Sizes of a stack of LSTM layers whose inputs are as wide as its outputs."""

    layers: int = option(4, help="Number of layers.", min=1, max=limits.LAYERS)
    steps: int = option(100, help="Steps of a sequence.", min=1, max=limits.POSITIONS)
    hidden: int = option(512, help="Units of a layer.", min=1, max=limits.WIDTH)

    def operations(self, batch: int) -> int:
        """Returns the operations of the forward pass; backward takes twice as many."""
        return 2 * self.layers * self.steps * batch * 4 * self.hidden * 2 * self.hidden


def arguments(
    shape: StackShape, batch: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[LSTMWeights]]:
    """Draws inputs (B, T, H) and layers, all of which need gradients."""
    torch.manual_seed(1)
    layers = [lstm_weights(shape.hidden, dtype, device) for _ in range(shape.layers)]
    inputs = torch.randn(batch, shape.steps, shape.hidden, device=device)
    return inputs.to(dtype).requires_grad_(), layers


def passes_of(stack: Stack, inputs: Tensor, layers: Sequence[LSTMWeights]) -> tuple[Call, Call]:
    """Returns the forward pass that a backward pass can follow, and both with all gradients."""
    forward = partial(stack, inputs, layers)
    return forward, passes(forward, [inputs, *(part for layer in layers for part in layer)])["both"]


def ablation_rows(
    shape: StackShape,
    batch: int,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    say: Say,
    *,
    samples: int,
    compile_loop: bool,
    launched: bool = False,
    only: Collection[str] = (),
) -> Iterator[Row]:
    """Yields a row for each schedule and type, with gains over the first row of its type.

    ``samples`` are timed calls, of which the fastest counts. ``launched`` also times calls outside a CUDA graph.
    ``only`` keeps the schedules whose names contain one of its parts; InputError is raised if there is none.
    """
    known = {stage.name: stage for stage in stages(compile_loop, device.type == "cuda")}
    parts = [part.lower() for part in only or [""]]
    chosen = [stage for name, stage in known.items() if any(part in name.lower() for part in parts)]
    if not chosen:
        raise InputError(f"--schedule '{', '.join(only)}': in no name of {'; '.join(known)}")
    numbers = itertools.count(1)
    for dtype in dtypes:
        inputs, layers = arguments(shape, batch, dtype, device)
        slowest: dict[str, float] = {}
        expected: list[Tensor] = []
        for stage in chosen:
            say(f"lstm {next(numbers)} of {len(dtypes) * len(chosen)}: {stage.name}, {dtype_name(dtype)}")
            forward, both = passes_of(stage.run, inputs, layers)
            row: Row = {"bench": "lstm", "schedule": stage.name, "dtype": dtype_name(dtype)}
            row |= {**asdict(shape), "batch": batch}
            results: list[Tensor] = []
            first = seconds_of(lambda: results.extend(both()), device)  # noqa: B023  called at once
            results = [part.detach().clone() for part in results]
            expected = expected or [part.double() for part in results]
            row |= {"first call, s": first, "difference": largest_difference(results, expected)}
            row |= _timed(forward, both, shape.operations(batch), device, samples, launched)
            for what in ("forward", "forward and backward"):
                slowest.setdefault(what, float(row[f"{what}, ms"]))
                row[f"{what}, gain"] = slowest[what] / float(row[f"{what}, ms"])
            yield {**row, "published gain": stage.published, "published, together": stage.together}


def rates(
    shape: StackShape,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    say: Say,
    *,
    samples: int,
    launched: bool = False,
    batches: Sequence[int] | None = None,
    limit: float = math.inf,
    done: Collection[tuple[str, int]] = (),
) -> Iterator[Row]:
    """Yields a row for each batch, type and implementation: operations a second beside one large product.

    No batch begins after ``limit`` seconds; ``done`` are (type, batch) that are left out.
    """
    end = time.monotonic() + limit
    best = own_layers(backend="compiled" if has_compiler() else "eager")
    ways = {"econmt_ops": best, "torch.nn.LSTM": by_torch}
    for dtype in dtypes:
        remaining = [batch for batch in batches or BATCHES if (dtype_name(dtype), batch) not in done]
        peak = _peak_rate(shape.hidden, dtype, device) if remaining else 0.0
        for number, batch in enumerate(remaining, 1):
            if time.monotonic() > end:
                return
            inputs, layers = arguments(shape, batch, dtype, device)
            rows: list[Row] = []
            for name, stack in ways.items():
                say(f"lstm {number} of {len(remaining)}: batch {batch}, {name}, {dtype_name(dtype)}")
                row: Row = {"bench": "lstm-rates", "schedule": name, "dtype": dtype_name(dtype)}
                row |= {**asdict(shape), "batch": batch}
                forward, both = passes_of(stack, inputs, layers)
                row["first call, s"] = seconds_of(both, device)
                row |= _timed(forward, both, shape.operations(batch), device, samples, launched)
                rows.append({**row, "peak GFLOP/s": peak})
            yield from rows


def _timed(
    forward: Call, both: Call, operations: int, device: torch.device, samples: int, launched: bool
) -> Row:
    """Returns the fastest and the median of some calls, on a GPU in a graph, and memory.

    ``operations`` are those of the forward pass; ``launched`` adds the faster of two calls outside a graph.
    """
    row: Row = {}
    for what, function, passes_made in (("forward", forward, 1), ("forward and backward", both, 3)):
        if launched:
            row[f"{what}, launched, ms"] = 1e3 * min(seconds_of(function, device) for _ in range(2))
        call = replayed(function, device)
        times = [seconds_of(call, device) for _ in range(samples)]
        del call
        row[f"{what}, ms"] = 1e3 * min(times)
        row[f"{what}, median ms"] = 1e3 * quantile(times, 0.5)
        row[f"{what}, GFLOP/s"] = passes_made * operations / min(times) / 1e9
    return {**row, "peak bytes": peak_bytes(both, device)}


def _peak_rate(hidden: int, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the GFLOP/s of one large product of this hidden size."""
    rows = 8192
    left = torch.randn(rows, hidden, device=device).to(dtype)
    right = torch.randn(hidden, 4 * hidden, device=device).to(dtype)
    fastest = min(seconds_of(lambda: torch.mm(left, right), device) for _ in range(8))
    return 2 * rows * hidden * 4 * hidden / fastest / 1e9


def draw_rates(rows: Sequence[Mapping[str, str | int | float]], path: Path) -> None:
    """Draws operations a second, forward and backward, against the batch: a line for each way and type."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        points = lines.setdefault(f"{row['schedule']}, {row['dtype']}", {})
        points[int(row["batch"])] = float(row["forward and backward, GFLOP/s"])
    peaks = {f"one large product, {row['dtype']}": float(row["peak GFLOP/s"]) for row in rows}
    draw_lines(lines, path, axes=("batch", "GFLOP/s, forward and backward"), log="x", across=peaks)


@with_option_groups
def lstm_command(
    context: typer.Context,
    *,
    ablation: bool = option(
        False, help="Add the decisions of the schedule one by one; else measure batches up to the peak."
    ),
    compile_loop: bool = option(
        False,
        help="With --ablation: also torch.compile of a plain loop, which compiles for about a second a step.",
    ),
    schedules: list[str] | None = option(
        None, "--schedule", help="With --ablation: only schedules whose names contain this; may be repeated."
    ),
    shape: StackShape,
    batches: list[int] | None = option(
        None, "--batch", help="Number of sequences; may be repeated without --ablation.", min=1
    ),
    dtypes: Dtypes = ["float32", "bfloat16"],  # noqa: B006  typer copies it
    samples: int = option(5, help="Timed calls of each schedule; the fastest counts.", min=1),
    graphs_only: bool = option(
        False, help="On a GPU: leave out calls whose kernels Python launches one by one, which are slow."
    ),
    limit: Seconds = option(600.0, help="Without --ablation: seconds after which no further batch begins."),
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
    on_gpu = session.device.type == "cuda"
    if not on_gpu:
        refuse_idle(context, "is for a GPU; leave it out", "graphs_only")
    timing: dict[str, Any] = {"samples": samples, "launched": on_gpu and not graphs_only}
    types = dtypes_of(dtypes)
    title = f"LSTM: {shape.layers} layers, {shape.steps} steps, {shape.hidden} units"
    before = [] if ablation else session.rows_before({"bench": "lstm-rates", **asdict(shape)})
    with session.measuring() as say:
        if ablation:
            [batch] = batches or [BATCH]
            title += f", batch {batch}"
            choice: dict[str, Any] = {"compile_loop": compile_loop, "only": schedules or ()}
            measured = ablation_rows(shape, batch, types, session.device, say, **timing, **choice)
        else:
            done = {(row["dtype"], int(row["batch"])) for row in before}
            measured = rates(
                shape, types, session.device, say, **timing, batches=batches, limit=limit, done=done
            )
        rows = session.kept(measured)
    times, rate = ("forward, ms", "forward and backward, ms"), "forward and backward, GFLOP/s"
    if ablation:
        gains = ("forward, gain", "published gain", "published, together", "forward and backward, gain", rate)
        figures = (
            *times,
            *gains,
            "forward and backward, launched, ms",
            "peak bytes",
            "difference",
            "first call, s",
        )
        session.print(rows, ("dtype", "schedule", *figures), title)
        session.draw(rows, label=("dtype", "schedule"), value=times[1], title=title)
        return
    session.print(rows, ("dtype", "schedule", "batch", *times, rate, "peak GFLOP/s"), title)
    everything: list[Mapping[str, str | int | float]] = [*before, *rows]
    if session.plot is not None and everything:
        draw_rates(everything, session.plot)
