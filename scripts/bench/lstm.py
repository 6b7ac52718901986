"""Times schedules of an LSTM stack, slowest to fastest.

    python -m scripts.bench lstm
    python -m scripts.bench lstm --schedule torch. --dtype bfloat16

On a GPU times are those of CUDA graphs, so that launches from Python do not count, and there are schedules with a CUDA
stream for each of several products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from econmt.bench.rows import Row, Say
from econmt.checkpoint.tensor_files import dtype_name
from econmt.engine.devices import reproducible, seconds_of
from econmt.errors import InputError
from econmt_ops import LSTMWeights
from scripts.bench.frame import Bench, Call, replayed
from scripts.bench.layers import largest_difference, lstm_weights, passes, peak_bytes
from scripts.bench.lstm_schedules import Stack, stages


@dataclass(frozen=True)
class StackShape:
    """Sizes of a stack of LSTM layers whose inputs are as wide as its outputs: those of Optim-LSTM's comparison."""

    layers: int = 4
    steps: int = 100
    hidden: int = 512
    batch: int = 64

    @property
    def operations(self) -> int:
        """Number of operations of the forward pass; backward takes twice as many."""
        return 2 * self.layers * self.steps * self.batch * 4 * self.hidden * 2 * self.hidden


def arguments(
    shape: StackShape, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[LSTMWeights]]:
    """Draws inputs (B, T, H) and layers, all of which need gradients."""
    torch.manual_seed(1)
    layers = [lstm_weights(shape.hidden, dtype, device) for _ in range(shape.layers)]
    inputs = torch.randn(shape.batch, shape.steps, shape.hidden, device=device)
    return inputs.to(dtype).requires_grad_(), layers


def passes_of(stack: Stack, inputs: Tensor, layers: Sequence[LSTMWeights]) -> tuple[Call, Call]:
    """Returns the forward pass that a backward pass can follow, and both with all gradients."""
    forward = partial(stack, inputs, layers)
    return forward, passes(forward, [inputs, *(part for layer in layers for part in layer)])["both"]


def chosen_stages(only: Sequence[str], on_gpu: bool) -> dict[str, Stack]:
    """Returns the schedules whose names contain one of the parts; InputError is raised if there is none."""
    known = stages(on_gpu)
    parts = [part.lower() for part in only or [""]]
    chosen = {name: run for name, run in known.items() if any(part in name.lower() for part in parts)}
    if not chosen:
        raise InputError(f"--schedule '{', '.join(only)}': in no name of {'; '.join(known)}")
    return chosen


def rows(
    shape: StackShape,
    dtypes: Sequence[torch.dtype],
    schedules: Mapping[str, Stack],
    device: torch.device,
    say: Say,
    samples: int,
) -> Iterator[Row]:
    """Yields a row for each type and schedule, with gains over the first schedule.

    ``samples`` are timed calls, of which the fastest counts.
    """
    for dtype in dtypes:
        inputs, layers = arguments(shape, dtype, device)
        slowest: dict[str, float] = {}
        expected: list[Tensor] = []
        for name, stack in schedules.items():
            say(f"{name}, {dtype_name(dtype)}")
            forward, both = passes_of(stack, inputs, layers)
            row: Row = {"schedule": name, "dtype": dtype_name(dtype), **asdict(shape)}
            results: list[Tensor] = []
            row["first call, s"] = seconds_of(lambda: results.extend(both()), device)  # noqa: B023  at once
            results = [part.detach().clone() for part in results]
            expected = expected or [part.double() for part in results]
            row["difference"] = largest_difference(results, expected)
            for what, function, passes_made in (("forward", forward, 1), ("forward and backward", both, 3)):
                call = replayed(function, device)
                fastest = min(seconds_of(call, device) for _ in range(samples))
                del call
                row[f"{what}, ms"] = 1e3 * fastest
                row[f"{what}, GFLOP/s"] = passes_made * shape.operations / fastest / 1e9
                row[f"{what}, gain"] = slowest.setdefault(what, fastest) / fastest
            yield row | {"peak bytes": peak_bytes(both, device)}


def main(words: Sequence[str] | None = None) -> None:
    bench, shape = Bench(__doc__, device="auto"), StackShape()
    add = bench.add_argument
    add("--schedule", action="append", default=[], help="only schedules whose names contain this")
    add("--dtype", action="append", help="types of the operands (float32 and bfloat16)")
    add("--samples", type=int, default=5, help="timed calls, of which the fastest counts (%(default)s)")
    given = bench.begin(words)
    types = [getattr(torch, name) for name in given.dtype or ("float32", "bfloat16")]
    schedules = chosen_stages(given.schedule, given.device.type == "cuda")
    columns = [f"{name}, {unit}" for unit in ("ms", "gain") for name in ("forward", "forward and backward")]
    columns += ["forward and backward, GFLOP/s", "peak bytes", "difference", "first call, s"]
    bench.print_header(
        f"{shape.layers} layers, {shape.steps} steps, {shape.hidden} units, {shape.batch} rows"
    )
    with reproducible(given.device, given.threads):
        measured = rows(shape, types, schedules, given.device, bench.say, given.samples)
        bench.report(measured, "LSTM", ("dtype", "schedule", *columns))
