"""Times a layer of every cell against torch.nn.LSTM.

    OMP_NUM_THREADS=1 python -m scripts.bench cells --turns 3
    python -m scripts.bench cells --device cuda --dtype bfloat16 --sizes 64x100x512 128x100x1024 --cells sru ssru
    python -m scripts.bench cells --device cuda --cells lstm --grid --csv grid.csv

A row is one implementation of a cell; on a GPU and with --grid "auto" marks the one that the rule takes. Times are of
forward and backward with all gradients, in turns: on a CPU the least seconds of the processor (all threads), which
other processes disturb little, or of the clock with --wall; on a GPU medians in CUDA graphs, as in a captured step.
Outputs and all gradients are first compared with the definition in float64; the error is the largest |found - exact| /
|exact| of a tensor. Float32 is IEEE float32 everywhere, or TF32 everywhere with --tf32. On a GPU kernels are compiled
first, in several processes. With --grid the shapes are those of ``econmt bench select --grid``: batches of 1 to 512,
hidden sizes of 128 to 1,024, lengths of 5 to 100; only what the rule takes is timed then.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import econmt_ops
from econmt.bench.rows import Row, append_csv, circumstances
from econmt.bench.selection import grid
from econmt_ops.cells.table import CELLS
from econmt_ops.dispatch.rule import captured, rule
from econmt_ops.dispatch.timing import alternate
from econmt_ops.dispatch.traits import implementations_of
from scripts.bench.gpu.frame import arguments, compiled_by_workers, heading, milliseconds
from scripts.bench.layers import Call, passes, relative, torch_lstm

MOST = {torch.bfloat16: 6e-2, torch.float32: 2e-3}
"""Largest error with which a time counts."""
OTHERS = {"cpu": ("reference", "recompute"), "cuda": ("recompute", "triton")}
"""Implementations that are timed beside the one of the rule; of a GRU on a GPU also cuDNN's, the reference."""
LIBRARY = "torch.nn.LSTM"


class Size(NamedTuple):
    """Rows, steps and units of a layer, whose inputs are as wide."""

    batch: int
    steps: int
    hidden: int

    @classmethod
    def of(cls, text: str) -> Size:
        """Reads a size such as "64x100x512"."""
        return cls(*map(int, text.split("x")))


class Layer:
    """Layer of one cell with its inputs; the values are the same for every type."""

    def __init__(self, name: str, size: Size, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(1)
        shapes = CELLS[name].parameter_shapes(size.hidden, size.hidden).values()
        made = [torch.randn(size.batch, size.steps, size.hidden, device=device)]
        made += [torch.randn(shape, device=device) * 0.03 for shape in shapes]
        self._op, self._weights = getattr(econmt_ops, name), CELLS[name].weights
        self._leaves = [tensor.to(dtype).requires_grad_() for tensor in made]
        self._incoming = torch.randn_like(made[0]).to(dtype)

    def both(self, implementation: str, exact: bool = False) -> Call:
        """Returns both passes, in float64 if ``exact``; all implementations but "auto" keep their gates."""
        dtype = torch.float64 if exact else self._incoming.dtype
        leaves = (
            [each.detach().to(dtype).requires_grad_() for each in self._leaves] if exact else self._leaves
        )
        stash = "auto" if implementation == "auto" else "gates"

        def run() -> Tensor:
            layers = (self._weights(*leaves[1:]),)
            outputs: Tensor = self._op(leaves[0], layers, implementation=implementation, stash=stash)[0]
            return outputs

        return passes(run, leaves, self._incoming.to(dtype))["both"]

    def error(self, implementation: str, expected: Sequence[Tensor]) -> float:
        """Returns the largest relative error of an implementation; infinity for NaN."""
        # By norms, since a ReLU has another slope where rounding changes the sign of c.
        errors = [relative(*pair) for pair in zip(self.both(implementation)(), expected, strict=True)]
        return max(errors) if all(error == error for error in errors) else float("inf")


def ways(name: str, size: Size, dtype: torch.dtype, device: str) -> list[str]:
    """Returns the implementations of a cell to time, the one of the rule first."""
    chosen = rule(name, device, dtype, sizes=dict(zip("BTH", size, strict=True)))
    wanted = (*OTHERS[device], "reference") if name == "gru" else OTHERS[device]
    known = [each.name for each in implementations_of(name).values() if each.traits.runs_on(device, dtype)]
    return list(dict.fromkeys([chosen, *(each for each in known if each in wanted)]))


def timed(calls: dict[str, Call], given: argparse.Namespace) -> dict[str, float]:
    """Returns the milliseconds of each call."""
    if given.device == "cuda":
        return milliseconds(calls, given.turns)
    clock, turns = time.perf_counter if given.wall else time.process_time, given.turns
    timings = alternate(calls, math.inf, clock=clock, least=turns, most=turns, drop=False)
    assert timings is not None
    return {name: 1e3 * min(timing.samples) for name, timing in timings.items()}


def measure(size: Size, dtype: torch.dtype, given: argparse.Namespace) -> Iterator[Row]:
    """Prints a table and yields its rows; those of implementations that are wrong have no time."""
    device = torch.device(given.device)
    calls = {LIBRARY: torch_lstm(*size[:2], size.hidden, dtype, device)["both"]}
    errors: dict[str, float] = {}
    for name in given.cells:
        layer, names = Layer(name, size, dtype, device), ways(name, size, dtype, given.device)
        expected = [part.detach() for part in layer.both("reference", exact=True)()]
        for way in names[:1] if given.grid else names:
            label = f"{name:10} {way}"
            if way == names[0] and (given.grid or device.type == "cuda"):
                way, label = "auto", f"{label} (auto)"
            errors[label] = layer.error(way, expected)
            if errors[label] <= MOST[dtype]:
                calls[label] = layer.both(way)
        del expected
    times = timed(calls, given)
    print(f"\nB {size.batch}, T {size.steps}, H {size.hidden}, {str(dtype)[6:]}")
    print(f"{'layer':28}{'error':>9}{'ms':>10}{'x nn.LSTM':>11}")
    base = times[LIBRARY]
    print(f"{LIBRARY:28}{'':9}{base:10.3f}{1:11.2f}")
    for label, error in errors.items():
        row: Row = {
            "bench": "cells",
            **size._asdict(),
            "dtype": str(dtype)[6:],
            "layer": label,
            "error": error,
        }
        if label in times:
            row |= {"milliseconds": times[label], "nn.LSTM ms": base, "x nn.LSTM": base / times[label]}
        figures = f"{times[label]:10.3f}{base / times[label]:11.2f}" if label in times else "     WRONG"
        print(f"{label:28}{error:9.1e}{figures}", flush=True)
        yield row


def summarize(rows: Sequence[Row]) -> None:
    """Prints how the speed of what the rule takes is spread over the shapes, for each type."""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        ratios = sorted(
            float(row["x nn.LSTM"]) for row in rows if row["dtype"] == dtype and "x nn.LSTM" in row
        )
        print(
            f"{dtype}: {len(ratios)} shapes, {ratios[0]:.2f}x to {ratios[-1]:.2f}x, median "
            f"{ratios[len(ratios) // 2]:.2f}x, {sum(ratio < 0.95 for ratio in ratios)} more than 5 % slower"
        )


def compiling(name: str, size: Size, dtype: torch.dtype) -> None:
    """Runs a cell once over a few steps, as in a captured step."""
    with captured():
        way = ways(name, size, dtype, "cuda")[0]
        Layer(name, size._replace(steps=4), dtype, torch.device("cuda")).both(way)()


def main() -> None:
    parser, types = arguments(__doc__), ("bfloat16", "float32")
    add = parser.add_argument
    sizes = [Size(64, 100, 512)]
    add("--sizes", nargs="+", type=Size.of, default=sizes, metavar="BxTxH", help="rows, steps and units")
    add("--grid", action="store_true", help="all shapes of econmt's grid, instead of --sizes")
    add("--cells", nargs="+", choices=list(CELLS), default=list(CELLS), help="cells to time")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device (%(default)s)")
    add(
        "--dtype",
        nargs="+",
        choices=types,
        help="types of weights and inputs; default: both, on a CPU float32",
    )
    add("--tf32", action="store_true", help="compute float32 products in TF32, in cuDNN too")
    add("--turns", type=int, default=5, help="timed samples of each layer (%(default)s)")
    add("--wall", action="store_true", help="on a CPU: measure wall-clock time, not processor time")
    add("--csv", type=Path, help="file to which the rows are appended")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = given.tf32
    if given.grid:
        shapes = (Size(each.batch, each.length, each.hidden) for each in grid() if each.op == "lstm")
        given.sizes = list(dict.fromkeys(shapes))
    on_gpu, device = given.device == "cuda", torch.device(given.device)
    dtypes = [getattr(torch, name) for name in given.dtype or types[0 if on_gpu else 1 :]]
    cases = [(size, dtype) for size in given.sizes for dtype in dtypes]
    jobs = [partial(compiling, name, *case) for name in given.cells for case in cases]
    if on_gpu and compiled_by_workers("cells", given.compile, jobs):
        return
    with captured(on_gpu):
        print(f"{heading(device)}, {'TF32' if given.tf32 else 'IEEE float32'}")
        rows = [row for case in cases for row in measure(*case, given)]
    if given.grid:
        summarize(rows)
    if given.csv is not None:
        append_csv(given.csv, rows, circumstances(device))
    sys.exit(0 if all("milliseconds" in row for row in rows) else 1)


if __name__ == "__main__":
    main()
