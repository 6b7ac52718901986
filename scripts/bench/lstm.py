"""``python -m scripts.bench lstm``: times schedules of an LSTM stack, from eight products a cell to the fastest.

Most steps are written here in plain PyTorch with autograd; from "own backward pass" on it is `econmt_ops.lstm`. All
compute the same function.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.nn import functional

from econmt.bench.rows import Row, Say
from econmt.checkpoint.tensor_files import dtype_name
from econmt.cli.measuring import BenchSession, Dtypes, Seconds, dtypes_of
from econmt.cli.option_groups import option, with_option_groups
from econmt.cli.options import refuse_idle
from econmt.config import limits
from econmt.engine.devices import seconds_of
from econmt.errors import InputError
from econmt_ops import LSTMWeights
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.cells import lstm as cell
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.stack import StackOptions
from econmt_ops.dispatch.timing import quantile
from econmt_ops.lstm import recompute
from scripts.bench.layers import Call, by_torch, lstm_weights, passes, peak_bytes
from scripts.bench.plots import draw_lines

BATCH = 64
"""Batch of the published comparison (Optim-LSTM), whose other sizes are the defaults of :class:`StackShape`."""

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batches of the table of operations a second."""

Stack = Callable[[Tensor, Sequence[LSTMWeights]], Tensor]


@dataclass(frozen=True)
class StackShape:
    """Sizes of a stack of LSTM layers whose inputs are as wide as its outputs."""

    layers: int = option(4, help="Number of layers.", min=1, max=limits.LAYERS)
    steps: int = option(100, help="Steps of a sequence.", min=1, max=limits.POSITIONS)
    hidden: int = option(512, help="Units of a layer.", min=1, max=limits.WIDTH)

    def operations(self, batch: int) -> int:
        """Returns the operations of the forward pass; backward takes twice as many."""
        return 2 * self.layers * self.steps * batch * 4 * self.hidden * 2 * self.hidden


class Stage(NamedTuple):
    """Schedule of a stack: its name, the published gain of the decision that it adds, and the function."""

    name: str
    published: str
    run: Stack


def plain_layer(
    inputs: Tensor,
    layer: LSTMWeights,
    *,
    combined: bool = False,
    at_once: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Computes a layer (B, T, I) to (B, T, H) from zero states, as a loop of plain operations.

    ``combined`` computes the four gates of a cell in one product, ``at_once`` also the inputs' products of all steps
    before the loop. ``transposed`` stores the weights for X W' before the loop.
    """
    read, recurrent = layer.input, layer.hidden
    if transposed:
        read, recurrent = read.t().contiguous().t(), recurrent.t().contiguous().t()
    h = inputs.new_zeros(inputs.shape[0], layer.hidden.shape[1])
    c = h.to(accumulate_dtype(h.dtype))
    steps = functional.linear(inputs, read, layer.bias).unbind(1) if at_once else inputs.unbind(1)
    parts = list(zip(read.chunk(4), recurrent.chunk(4), layer.bias.chunk(4), strict=True))
    outputs = []
    for x in steps:
        if at_once:
            gates: Sequence[Tensor] = torch.addmm(x, h, recurrent.t()).chunk(4, 1)
        elif combined:
            total = functional.linear(x, read, layer.bias) + functional.linear(h, recurrent)
            gates = total.chunk(4, 1)
        else:
            gates = [
                functional.linear(x, each, bias) + functional.linear(h, square)
                for each, square, bias in parts
            ]
        i, f, g, o = (gate.to(c.dtype) for gate in gates)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = (torch.sigmoid(o) * torch.tanh(c)).to(inputs.dtype)
        outputs.append(h)
    return torch.stack(outputs, 1)


def _plain(layer_function: Callable[..., Tensor] = plain_layer, **options: bool) -> Stack:
    def run(inputs: Tensor, layers: Sequence[LSTMWeights]) -> Tensor:
        for layer in layers:
            inputs = layer_function(inputs, layer, **options)
        return inputs

    return run


def wavefront(inputs: Tensor, layers: Sequence[LSTMWeights]) -> Tensor:
    """Computes all cells (layer l, step t) of the same l + t in one batched product, L + T - 1 instead of L T."""
    count, (batch, steps, hidden) = len(layers), inputs.shape
    weights = torch.stack([torch.cat([layer.input, layer.hidden], 1).t() for layer in layers])
    biases = torch.stack([layer.bias for layer in layers]).unsqueeze(1)
    h = [inputs.new_zeros(batch, hidden)] * count
    c = [h[0].to(accumulate_dtype(h[0].dtype))] * count
    outputs = []
    for diagonal in range(steps + count - 1):
        low, high = max(0, diagonal - steps + 1), min(count - 1, diagonal) + 1
        below = [inputs[:, min(diagonal, steps - 1)], *h]
        reads = torch.stack([torch.cat([below[layer], h[layer]], 1) for layer in range(low, high)])
        sums = torch.baddbmm(biases[low:high], reads, weights[low:high])
        made_h, made_c = cell.forward(sums.flatten(0, 1), torch.cat(c[low:high]))
        h[low:high], c[low:high] = made_h.chunk(high - low), made_c.chunk(high - low)
        outputs += [h[-1]] if high == count else []
    return torch.stack(outputs, 1)


def _own(backend: str = "eager") -> Stack:
    """Returns `econmt_ops.lstm` with its own backward pass, all gates kept."""

    def run(inputs: Tensor, layers: Sequence[LSTMWeights]) -> Tensor:
        h = inputs.new_zeros(inputs.shape[0], layers[0].hidden.shape[1])
        zero = (h, h.to(accumulate_dtype(h.dtype)))
        state, options = (zero,) * len(layers), StackOptions(from_zero=True)
        return recompute.lstm(inputs, tuple(layers), state, options, stash="gates", backend=backend)[0]

    return run


def stages(compile_loop: bool) -> list[Stage]:
    """Returns the schedules, each with all decisions of those before it, then those it is compared with.

    ``compile_loop`` adds one layer's loop under torch.compile, which compiles for minutes.
    """
    fused = has_compiler()
    schedules = [
        Stage("eight products a cell", "1x", _plain()),
        Stage("four gates in one product", "2x", _plain(combined=True)),
        Stage("input products of all steps in one", "", _plain(at_once=True)),
        Stage("weights transposed", "1.06x", _plain(at_once=True, transposed=True)),
        Stage("layer wavefront", "1.3x", wavefront),
        Stage("own backward pass, weights packed", "", _own()),
    ]
    if fused:
        schedules.append(Stage("pointwise fused (compiled)", "1.2x", _own("compiled")))
    schedules.append(Stage("torch.nn.LSTM", "", by_torch))
    if compile_loop and fused:
        compiled = torch.compile(plain_layer, dynamic=False)
        schedules.append(Stage("torch.compile of the loop", "", _plain(compiled, at_once=True)))
    return schedules


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
    only: Collection[str] = (),
) -> Iterator[Row]:
    """Yields a row for each schedule and type, with gains over the first row of its type.

    ``samples`` are timed calls, of which the fastest counts. ``only`` keeps the schedules whose names contain one of
    its parts; InputError is raised if there is none.
    """
    known = {stage.name: stage for stage in stages(compile_loop)}
    parts = [part.lower() for part in only or [""]]
    chosen = [stage for name, stage in known.items() if any(part in name.lower() for part in parts)]
    if not chosen:
        raise InputError(f"--schedule '{', '.join(only)}': in no name of {'; '.join(known)}")
    numbers = itertools.count(1)
    for dtype in dtypes:
        inputs, layers = arguments(shape, batch, dtype, device)
        slowest: dict[str, float] = {}
        for stage in chosen:
            say(f"lstm {next(numbers)} of {len(dtypes) * len(chosen)}: {stage.name}, {dtype_name(dtype)}")
            forward, both = passes_of(stage.run, inputs, layers)
            row: Row = {"bench": "lstm", "schedule": stage.name, "dtype": dtype_name(dtype)}
            row |= {**asdict(shape), "batch": batch}
            row |= _timed(forward, both, shape.operations(batch), device, samples)
            for what in ("forward", "forward and backward"):
                slowest.setdefault(what, float(row[f"{what}, ms"]))
                row[f"{what}, gain"] = slowest[what] / float(row[f"{what}, ms"])
            yield {**row, "published gain": stage.published}


def rates(
    shape: StackShape,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    say: Say,
    *,
    samples: int,
    batches: Sequence[int] | None = None,
    limit: float = math.inf,
    done: Collection[tuple[str, int]] = (),
) -> Iterator[Row]:
    """Yields a row for each batch, type and implementation: operations a second beside one large product.

    No batch begins after ``limit`` seconds; ``done`` are (type, batch) that are left out.
    """
    end = time.monotonic() + limit
    best = _own(backend="compiled" if has_compiler() else "eager")
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
                row |= _timed(*passes_of(stack, inputs, layers), shape.operations(batch), device, samples)
                rows.append({**row, "peak GFLOP/s": peak})
            yield from rows


def _timed(forward: Call, both: Call, operations: int, device: torch.device, samples: int) -> Row:
    """Returns seconds of the first call, the fastest and the median of the others, and memory.

    ``operations`` are those of the forward pass.
    """
    row: Row = {"first call, s": seconds_of(both, device)}
    for what, function, passes_made in (("forward", forward, 1), ("forward and backward", both, 3)):
        times = [seconds_of(function, device) for _ in range(samples)]
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
    types = dtypes_of(dtypes)
    title = f"LSTM: {shape.layers} layers, {shape.steps} steps, {shape.hidden} units"
    before = [] if ablation else session.rows_before({"bench": "lstm-rates", **asdict(shape)})
    with session.measuring() as say:
        if ablation:
            [batch] = batches or [BATCH]
            title += f", batch {batch}"
            choice: dict[str, Any] = {"compile_loop": compile_loop, "only": schedules or ()}
            measured = ablation_rows(shape, batch, types, session.device, say, samples=samples, **choice)
        else:
            done = {(row["dtype"], int(row["batch"])) for row in before}
            measured = rates(
                shape, types, session.device, say, samples=samples, batches=batches, limit=limit, done=done
            )
        rows = session.kept(measured)
    times, rate = ("forward, ms", "forward and backward, ms"), "forward and backward, GFLOP/s"
    if ablation:
        gains = ("forward, gain", "published gain", "forward and backward, gain", rate)
        session.print(rows, ("dtype", "schedule", *times, *gains, "peak bytes", "first call, s"), title)
        session.draw(rows, label=("dtype", "schedule"), value=times[1], title=title)
        return
    session.print(rows, ("dtype", "schedule", "batch", *times, rate, "peak GFLOP/s"), title)
    everything: list[Mapping[str, str | int | float]] = [*before, *rows]
    if session.plot is not None and everything:
        draw_rates(everything, session.plot)
