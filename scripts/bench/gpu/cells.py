"""Times a layer of every cell beside cuDNN's LSTM, forward and backward, all in CUDA graphs and in turns.

    python -m scripts.bench gpu.cells
    python -m scripts.bench gpu.cells --dtype bfloat16 --sizes 64x100x512 128x100x1024 --cells sru ssru

A row is a cell by one of its implementations; "auto" marks what runs in a captured step. Milliseconds are medians of
replays. Before its time counts, outputs and all gradients are compared with the definition in float64; the error is
the largest of |found - exact| / |exact| of a tensor. Float32 is IEEE float32 for all, with --tf32 TF32 for
all. Kernels are compiled first, in several processes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import econmt_ops
from econmt_ops.cells.table import CELLS
from econmt_ops.dispatch.rule import captured, rule
from econmt_ops.dispatch.traits import implementations_of
from scripts.bench.gpu.grid import DEVICE, WORKERS, Step, milliseconds

MOST = {torch.bfloat16: 6e-2, torch.float32: 2e-3}
"""The error with which a time still counts."""


CUDNN = ("gru", "reference")
"""A cell and its implementation that is cuDNN's, in float32."""


class Size(NamedTuple):
    """Of a layer: rows, steps, and units, as many as it reads."""

    batch: int
    steps: int
    hidden: int


def size_of(text: str) -> Size:
    """The size that "64x100x512" names."""
    return Size(*map(int, text.split("x")))


class Layer:
    """A layer of one of our ops with what it reads, the same values for every type."""

    def __init__(self, name: str, size: Size, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        shapes = CELLS[name].parameter_shapes(size.hidden, size.hidden).values()
        made = [torch.randn(size.batch, size.steps, size.hidden, device=DEVICE)]
        made += [torch.randn(shape, device=DEVICE) * 0.03 for shape in shapes]
        self._op, self._weights = getattr(econmt_ops, name), CELLS[name].weights
        self._leaves = [tensor.to(dtype).requires_grad_() for tensor in made]
        self._given = torch.randn_like(made[0]).to(dtype)

    def run(self, implementation: str, exact: bool = False) -> Sequence[Tensor]:
        """The outputs and all gradients, with ``exact`` in float64; what is not "auto" keeps its gates."""
        dtype = torch.float64 if exact else self._given.dtype
        leaves = (
            [leaf.detach().to(dtype).requires_grad_() for leaf in self._leaves] if exact else self._leaves
        )
        layer = self._weights(*leaves[1:])
        stash = "auto" if implementation == "auto" else "gates"
        outputs = self._op(leaves[0], (layer,), implementation=implementation, stash=stash)[0]
        return outputs, *torch.autograd.grad(outputs, leaves, self._given.to(dtype))

    def error(self, implementation: str, expected: Sequence[Tensor]) -> float:
        """Of an implementation, see the module; NaN counts as infinite."""
        largest = 0.0
        for found, wanted in zip(self.run(implementation), expected, strict=True):
            # Not the largest value's: where a rounded c has the other sign, a ReLU's slope is another.
            off = (found.detach().double() - wanted).norm() / wanted.norm()
            largest = max(largest, float(off.nan_to_num(float("inf"))))
        return largest


def theirs(size: Size, dtype: torch.dtype) -> Step:
    """The same of torch.nn.LSTM, which is cuDNN's."""
    module = torch.nn.LSTM(size.hidden, size.hidden, batch_first=True).to(DEVICE, dtype)
    inputs, given = (torch.randn(*size, device=DEVICE, dtype=dtype) for _ in range(2))
    leaves = [inputs.requires_grad_(), *module.parameters()]
    return lambda: torch.autograd.grad(module(inputs)[0], leaves, given)


def ways(name: str, size: Size, dtype: torch.dtype) -> list[str]:
    """The implementations of a cell that are timed, that of the rule first."""
    chosen = rule(name, "cuda", dtype, sizes=dict(zip("BTH", size, strict=True)))
    kinds = implementations_of(name).values()
    others = [
        each.name
        for each in kinds
        if each.traits.runs_on("cuda", dtype)
        and (each.name in ("recompute", "triton") or (name, each.name) == CUDNN)
    ]
    return list(dict.fromkeys([chosen, *others]))


def compile_all(cells: Sequence[str], arguments: list[str]) -> None:
    """All kernels into Triton's cache: processes run a cell each, once."""
    waiting = [*cells]
    while waiting:
        now, waiting = waiting[:WORKERS], waiting[WORKERS:]
        started = [
            subprocess.Popen([sys.executable, "-m", "scripts.bench.gpu.cells", *arguments, "--compile", name])
            for name in now
        ]
        for process in started:
            process.wait()


def measure(size: Size, dtype: torch.dtype, given: argparse.Namespace) -> bool:
    """Prints a table; returns whether all was right."""
    steps: dict[str, Step] = {"torch.nn.LSTM": theirs(size, dtype)}
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
                steps[label] = lambda layer=layer, way=way: layer.run(way)  # type: ignore[misc]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=size_of, default=[Size(64, 100, 512)], metavar="BxTxH")
    parser.add_argument("--cells", nargs="+", choices=sorted(CELLS), default=sorted(CELLS))
    parser.add_argument(
        "--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"]
    )
    parser.add_argument("--tf32", action="store_true", help="let products of float32 be TF32, theirs too")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    given: Any = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = given.tf32
    dtypes = [getattr(torch, name) for name in given.dtype]
    with captured():
        if given.compile is not None:
            for size in given.sizes:
                for dtype in dtypes:
                    Layer(given.compile, size._replace(steps=4), dtype).run(
                        ways(given.compile, size, dtype)[0]
                    )
            return
        compile_all(given.cells, sys.argv[1:])
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {'TF32' if given.tf32 else 'IEEE float32'}"
        )
        right = [measure(size, dtype, given) for size in given.sizes for dtype in dtypes]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
