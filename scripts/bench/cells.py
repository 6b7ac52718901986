"""Times a layer of every cell against torch.nn.LSTM.

    OMP_NUM_THREADS=1 python -m scripts.bench cells --turns 3
    python -m scripts.bench cells --device cuda --dtype bfloat16 --sizes 64x100x512 128x100x1024 --cells sru ssru
    python -m scripts.bench cells --device cuda --cells lstm --dtype float32 --tf32 --grid
    python -m scripts.bench cells --cells lstm --ranks 8 16 32 64 --sizes 64x100x256 16x100x256 1x100x256
    python -m scripts.bench cells --device cuda --cells lstm --ranks 8 32 --only auto recompute --sizes 64x100x256

A row is one implementation of a cell; on a GPU "auto" marks the one that the rule takes. Times are of the forward
pass, which keeps nothing, and of both passes with all gradients, in turns: on a CPU the least seconds of the processor
(all threads), which other processes disturb little, or of the clock with --wall; on a GPU medians in CUDA graphs, as in
a captured step. Outputs and all gradients are first compared with the definition in float64; the error is the largest
|found - exact| / |exact| of a tensor. Float32 is IEEE float32 everywhere, or TF32 everywhere with --tf32. On a GPU
kernels are compiled first, in several processes. With --grid both passes of "auto" are timed beside every
implementation with every stash level by name, at 48 sizes. With --ranks LSTM layers with low-rank matrices follow,
whose random factors have products as large as the matrices. --only keeps the rows whose names contain one of its parts:
"compiled" takes a minute to compile on a GPU, so "--only auto recompute" is much faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

import econmt_ops
from econmt.bench.rows import Row
from econmt_ops import LowRank, LowRankLSTMWeights
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.cells.table import KINDS
from econmt_ops.dispatch.rule import captured, rule
from econmt_ops.dispatch.traits import implementations_of
from econmt_ops.layers.op import OPS
from scripts.bench.frame import CPU, Bench, Call, in_turns, milliseconds
from scripts.bench.layers import Size, passes, relative, torch_lstm

MOST = {torch.bfloat16: 6e-2, torch.float32: 2e-3}
"""Largest error with which a time counts."""
OTHERS = {"cpu": ("reference", "recompute"), "cuda": ("recompute", "triton")}
"""Implementations that are timed beside the one of the rule; of a GRU on a GPU also cuDNN's, the reference."""
LIBRARY = "torch.nn.LSTM"
LEVELS = ("outputs", "cells", "gates")


GRID = [Size(b, t, h) for b in (1, 16, 64, 128, 256, 512) for t in (25, 100) for h in (128, 256, 512, 1024)]
"""Sizes with --grid."""


class Kind(NamedTuple):
    """Cell of a layer, and the rank of its matrices; 0 if they are whole."""

    cell: str
    rank: int = 0

    @property
    def label(self) -> str:
        """Name in the table."""
        return f"{self.cell} {self.rank}" if self.rank else self.cell


class Layer:
    """Layer of one cell with its inputs; the values are the same for every type."""

    def __init__(self, kind: Kind, size: Size, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(1)
        hidden, rank = size.hidden, kind.rank
        shapes = list(KINDS[kind.cell].parameter_shapes(hidden, hidden).values())
        scale, self._weights = 0.03, cast("Call", KINDS[kind.cell].weights)
        if rank:
            shapes = [(4 * hidden, rank), (rank, hidden), (4 * hidden, rank), (rank, hidden), (4 * hidden,)]
            scale, self._weights = (hidden * rank) ** -0.25, low_rank_weights
        made = [torch.randn(size, device=device)]
        made += [torch.randn(shape, device=device) * scale for shape in shapes]
        self.parameters = sum(part.numel() for part in made[1:])
        self._op = getattr(econmt_ops, kind.cell)
        self._leaves = [tensor.to(dtype).requires_grad_() for tensor in made]
        self._incoming = torch.randn_like(made[0]).to(dtype)

    def passes(self, implementation: str, exact: bool = False) -> dict[str, Call]:
        """Returns the passes of an implementation such as "triton" or "triton/cells", in float64 if ``exact``.

        All implementations but "auto" keep their gates if no stash level is given.
        """
        dtype = torch.float64 if exact else self._incoming.dtype
        leaves = (
            [each.detach().to(dtype).requires_grad_() for each in self._leaves] if exact else self._leaves
        )
        implementation, _, stash = implementation.partition("/")
        stash = stash or ("auto" if implementation == "auto" else "gates")

        def run() -> Tensor:
            layers = (self._weights(*leaves[1:]),)
            outputs: Tensor = self._op(leaves[0], layers, implementation=implementation, stash=stash)[0]
            return outputs

        return passes(run, leaves, self._incoming.to(dtype))

    def error(self, implementation: str, expected: Sequence[Tensor]) -> float:
        """Returns the largest relative error of an implementation; infinity for NaN."""
        # By norms, since a ReLU has another slope where rounding changes the sign of c.
        errors = [
            relative(*pair) for pair in zip(self.passes(implementation)["both"](), expected, strict=True)
        ]
        return max(errors) if all(error == error for error in errors) else float("inf")


def low_rank_weights(*parts: Tensor) -> LowRankLSTMWeights:
    """Puts the factors of both matrices and the bias together."""
    return LowRankLSTMWeights(LowRank(*parts[:2]), LowRank(*parts[2:4]), parts[4])


def ways(kind: Kind, dtype: torch.dtype, device: str, named: bool = False) -> list[str]:
    """Returns the implementations of a cell to time, the one of the rule first; of low rank all that recompute.

    If ``named``, every implementation but compiled ones follows once for each stash level.
    """
    known = [each for each in implementations_of(kind.cell).values() if each.traits.runs_on(device, dtype)]
    if kind.rank:
        usable = [each for each in known if has_compiler() or not each.traits.warms_up]
        return [each.name for each in usable if each.traits.recomputes]
    chosen = rule(kind.cell, device, dtype)
    if named:
        usable = [each for each in known if not each.traits.warms_up]
        levels = {each.name: LEVELS if each.traits.takes_stash else LEVELS[-1:] for each in usable}
        return [chosen, *(f"{name}/{level}" for name, stashes in levels.items() for level in stashes)]
    wanted = (*OTHERS[device], "reference") if kind.cell == "gru" else OTHERS[device]
    return list(dict.fromkeys([chosen, *(each.name for each in known if each.name in wanted)]))


def chosen_ways(kind: Kind, dtype: torch.dtype, given: argparse.Namespace) -> dict[str, str]:
    """Returns the implementations of a cell to time by the names of their rows, those that --only keeps."""
    names, chosen = ways(kind, dtype, given.device.type, given.grid), {}
    for way in names:
        label = f"{kind.label:10} {way}"
        if way == names[0] and not kind.rank and given.device.type == "cuda":
            way, label = "auto", f"{label} (auto)"
        if any(part in " ".join(label.split()) for part in given.only):
            chosen[label] = way
    return chosen


def kinds_of(given: argparse.Namespace) -> list[Kind]:
    """Returns the cells that the command line names, those of low rank last."""
    return [*map(Kind, given.cells), *(Kind("lstm", rank) for rank in given.ranks)]


def timed(calls: dict[str, Call], given: argparse.Namespace) -> dict[str, float]:
    """Returns the milliseconds of each call."""
    if given.device.type == "cuda":
        return milliseconds(calls, given.turns)
    clock = time.perf_counter if given.wall else time.process_time
    timings = in_turns(calls, CPU, turns=given.turns, clock=clock)
    return {name: 1e3 * min(timing.samples) for name, timing in timings.items()}


def measure(size: Size, dtype: torch.dtype, given: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of a size and type; those of implementations that are wrong have no time."""
    runs = {LIBRARY: torch_lstm(size, dtype, given.device)}
    shape: Row = {**size._asdict(), "dtype": str(dtype)[6:]}
    rows: dict[str, Row] = {LIBRARY: {**shape, "layer": LIBRARY}}
    for kind in kinds_of(given):
        chosen = chosen_ways(kind, dtype, given)
        if not chosen:
            continue
        layer = Layer(kind, size, dtype, given.device)
        expected = [part.detach() for part in layer.passes("reference", exact=True)["both"]()]
        for label, way in chosen.items():
            error = layer.error(way, expected)
            rows[label] = {**shape, "layer": label, "parameters": layer.parameters, "error": f"{error:.1e}"}
            if error <= MOST[dtype]:
                runs[label] = layer.passes(way)
            else:
                rows[label]["failure"] = "WRONG"
        del expected
    forward, both = (
        timed({name: run[what] for name, run in runs.items()}, given)
        if what == "both" or not given.grid
        else dict.fromkeys(runs, float("nan"))
        for what in ("forward", "both")
    )
    for label in runs:
        figures: Row = {"forward ms": forward[label], "milliseconds": both[label]}
        rows[label] |= figures | {"x nn.LSTM": both[LIBRARY] / both[label]}
    yield from rows.values()


def behind(rows: Sequence[Row]) -> None:
    """Prints how far "auto" is behind the fastest implementation by name, for each type."""
    shapes: dict[tuple[object, ...], dict[str, float]] = {}
    for row in rows:
        if "milliseconds" in row and row["layer"] != LIBRARY:
            shape = shapes.setdefault((row["dtype"], *(row[name] for name in Size._fields)), {})
            shape["auto" if "(auto)" in row["layer"] else row["layer"]] = row["milliseconds"]
    for dtype in dict.fromkeys(shape[0] for shape in shapes):
        of_type = {shape: times for shape, times in shapes.items() if shape[0] == dtype}
        ratios = {shape: times["auto"] / min(times.values()) for shape, times in of_type.items()}
        slow = sorted((-ratio, shape) for shape, ratio in ratios.items() if ratio > 1.02)
        print(
            f"{dtype}: auto takes at most {max(ratios.values()):.3f} of the time of the best by name; "
            f"more than 1.02 at {len(slow)} of {len(ratios)} shapes"
        )
        for ratio, shape in slow[:12]:
            times = of_type[shape]
            best = min(times, key=times.__getitem__)
            print(f"  {'x'.join(map(str, shape[1:]))}: {-ratio:.3f} of {best}, {times[best]:.3f} ms")


def compiling(name: str, size: Size, dtype: torch.dtype, named: bool = False) -> None:
    """Runs a cell once over a few steps, as in a captured step."""
    with captured():
        known = ways(Kind(name), dtype, "cuda", named)
        layer = Layer(Kind(name), size._replace(steps=4), dtype, torch.device("cuda"))
        for way in known if named else known[:1]:
            layer.passes(way)["both"]()


def main(words: Sequence[str] | None = None) -> int:
    bench, types = Bench(__doc__, device="cpu", turns=5, compiles=True), ("bfloat16", "float32")
    add = bench.add_argument
    sizes = [Size(64, 100, 512)]
    add("--sizes", nargs="+", type=Size.of, default=sizes, metavar="BxTxH", help="rows, steps and units")
    add(
        "--grid",
        action="store_true",
        help="on a GPU: 48 sizes, every implementation and stash level beside auto",
    )
    cells = ["lstm", *OPS]
    add("--cells", nargs="+", choices=cells, default=cells, help="cells to time")
    add("--ranks", nargs="+", type=int, default=[], help="also LSTM layers with matrices of these ranks")
    add("--only", nargs="+", default=[""], metavar="PART", help="only rows whose names contain one of these")
    add("--dtype", nargs="+", choices=types, help="types of weights and inputs (both, on a CPU float32)")
    add("--tf32", action="store_true", help="compute float32 products in TF32, in cuDNN too")
    add("--wall", action="store_true", help="on a CPU: measure wall-clock time, not processor time")
    given = bench.begin(words)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = given.tf32
    if given.grid:
        given.sizes = GRID
    on_gpu = given.device.type == "cuda"
    dtypes = [getattr(torch, name) for name in given.dtype or types[0 if on_gpu else 1 :]]
    cases = [(size, dtype) for size in given.sizes for dtype in dtypes]
    jobs = [partial(compiling, name, *case, given.grid) for name in given.cells for case in cases]
    if on_gpu and bench.compiled(jobs):
        return 0
    with captured(on_gpu):
        if not any(chosen_ways(kind, dtype, given) for kind in kinds_of(given) for dtype in dtypes):
            bench.error(
                f"--only {' '.join(given.only)}: in no row's name; the rows are named as 'lstm triton (auto)'"
            )
        bench.print_header("TF32" if given.tf32 else "IEEE float32")
        for case in cases:
            bench.report(measure(*case, given))
    if given.grid:
        behind(bench.rows)
    return int(any("failure" in row for row in bench.rows))
