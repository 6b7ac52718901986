"""Times every cell against cuDNN's LSTM on a GPU.

    python -m scripts.bench gpu.cells
    python -m scripts.bench gpu.cells --dtype bfloat16 --sizes 64x100x512 128x100x1024 --cells sru ssru

A row is one implementation of a cell; "auto" marks the one that a captured step runs. Milliseconds are medians of
forward and backward in CUDA graphs, in turns. Outputs and all gradients are first compared with the definition in
float64; the error is the largest |found - exact| / |exact| of a tensor. Float32 is IEEE float32 everywhere, or TF32
everywhere with --tf32. Kernels are compiled first, in several processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import econmt_ops
from econmt_ops.cells.table import CELLS
from econmt_ops.dispatch.rule import captured, rule
from econmt_ops.dispatch.traits import implementations_of
from scripts.bench.gpu.frame import (
    DEVICE,
    Call,
    arguments,
    compiled_by_workers,
    heading,
    milliseconds,
    relative,
)
from scripts.bench.gpu.lstm import cudnn

MOST = {torch.bfloat16: 6e-2, torch.float32: 2e-3}
"""Largest error with which a time counts."""
CUDNN = ("gru", "reference")
"""Cell and implementation that run cuDNN in float32."""


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

    def __init__(self, name: str, size: Size, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        shapes = CELLS[name].parameter_shapes(size.hidden, size.hidden).values()
        made = [torch.randn(size.batch, size.steps, size.hidden, device=DEVICE)]
        made += [torch.randn(shape, device=DEVICE) * 0.03 for shape in shapes]
        self._op, self._weights = getattr(econmt_ops, name), CELLS[name].weights
        self._leaves = [tensor.to(dtype).requires_grad_() for tensor in made]
        self._given = torch.randn_like(made[0]).to(dtype)

    def run(self, implementation: str, exact: bool = False) -> Sequence[Tensor]:
        """Returns the outputs and all gradients, in float64 if ``exact``; all but "auto" keep their gates."""
        dtype = torch.float64 if exact else self._given.dtype
        leaves = (
            [leaf.detach().to(dtype).requires_grad_() for leaf in self._leaves] if exact else self._leaves
        )
        layer = self._weights(*leaves[1:])
        stash = "auto" if implementation == "auto" else "gates"
        outputs = self._op(leaves[0], (layer,), implementation=implementation, stash=stash)[0]
        return outputs, *torch.autograd.grad(outputs, leaves, self._given.to(dtype))

    def error(self, implementation: str, expected: Sequence[Tensor]) -> float:
        """Returns the largest relative error of an implementation; infinity for NaN."""
        # By norms, since a ReLU has another slope where rounding changes the sign of c.
        errors = [relative(*pair) for pair in zip(self.run(implementation), expected, strict=True)]
        return max(errors) if all(error == error for error in errors) else float("inf")


def ways(name: str, size: Size, dtype: torch.dtype) -> list[str]:
    """Returns the implementations of a cell to time, the one of the rule first."""
    chosen = rule(name, "cuda", dtype, sizes=dict(zip("BTH", size, strict=True)))
    kinds = implementations_of(name).values()
    others = [
        each.name
        for each in kinds
        if each.traits.runs_on("cuda", dtype)
        and (each.name in ("recompute", "triton") or (name, each.name) == CUDNN)
    ]
    return list(dict.fromkeys([chosen, *others]))


def measure(size: Size, dtype: torch.dtype, given: argparse.Namespace) -> bool:
    """Prints a table; returns True if all implementations are right."""
    theirs = cudnn(size.batch, size.hidden, dtype, steps=size.steps)["both"]
    steps: dict[str, Call] = {"torch.nn.LSTM": theirs}
    errors: dict[str, float] = {}
    for name in given.cells:
        layer, names = Layer(name, size, dtype), ways(name, size, dtype)
        expected = [part.detach() for part in layer.run("reference", exact=True)]
        for way in names:
            label = f"{name:10} {way}"
            if way == names[0]:
                way, label = "auto", f"{label} (auto)"
            errors[label] = layer.error(way, expected)
            if errors[label] <= MOST[dtype]:
                steps[label] = lambda layer=layer, way=way: layer.run(way)
        del expected
    times = milliseconds(steps, given.turns)
    print(f"\nB {size.batch}, T {size.steps}, H {size.hidden}, {str(dtype)[6:]}")
    print(f"{'layer':28}{'error':>9}{'ms':>10}{'x nn.LSTM':>11}")
    base = times.pop("torch.nn.LSTM")
    print(f"{'torch.nn.LSTM':28}{'':9}{base:10.3f}{1:11.2f}")
    for label, error in errors.items():
        figures = f"{times[label]:10.3f}{base / times[label]:11.2f}" if label in times else "     WRONG"
        print(f"{label:28}{error:9.1e}{figures}", flush=True)
    return len(times) == len(errors)


def compiling(name: str, size: Size, dtype: torch.dtype) -> None:
    """Runs a cell once over a few steps, as in a captured step."""
    with captured():
        Layer(name, size._replace(steps=4), dtype).run(ways(name, size, dtype)[0])


def main() -> None:
    parser, types = arguments(__doc__), ("bfloat16", "float32")
    add = parser.add_argument
    sizes = [Size(64, 100, 512)]
    add("--sizes", nargs="+", type=Size.of, default=sizes, metavar="BxTxH", help="rows, steps and units")
    add("--cells", nargs="+", choices=sorted(CELLS), default=sorted(CELLS), help="cells to time")
    add("--dtype", nargs="+", choices=types, default=list(types), help="types of weights and inputs")
    add("--tf32", action="store_true", help="compute float32 products in TF32, in cuDNN too")
    add("--turns", type=int, default=5, help="timed samples of each layer (%(default)s)")
    given: Any = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = given.tf32
    dtypes = [getattr(torch, name) for name in given.dtype]
    jobs = [
        partial(compiling, name, size, dtype)
        for name in given.cells
        for size in given.sizes
        for dtype in dtypes
    ]
    if compiled_by_workers("gpu.cells", given.compile, jobs):
        return
    with captured():
        print(f"{heading()}, {'TF32' if given.tf32 else 'IEEE float32'}")
        right = [measure(size, dtype, given) for size in given.sizes for dtype in dtypes]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
