"""Times a layer of every cell beside cuDNN's LSTM, forward and backward, all in CUDA graphs and in turns.

    python scripts/gpu/bench_cells.py
    python scripts/gpu/bench_cells.py --dtype bfloat16 --hidden 1024

Milliseconds are medians of replays; every layer runs as ``auto`` runs it in a captured step.
"""

from __future__ import annotations

import argparse

import torch
from bench_grid import DEVICE, Step, milliseconds

import econmt_ops
from econmt_ops.cells.table import CELLS


def ours(name: str, inputs: torch.Tensor, hidden: int) -> Step:
    """A layer of one of our ops, with all gradients."""
    cell = CELLS[name]
    shapes = cell.parameter_shapes(inputs.shape[2], hidden).values()
    weights = cell.weights(
        *((torch.randn(shape, device=DEVICE, dtype=inputs.dtype) * 0.03).requires_grad_() for shape in shapes)
    )
    given = torch.randn(*inputs.shape[:2], hidden, device=DEVICE, dtype=inputs.dtype)
    leaves = [inputs, *weights]
    return lambda: torch.autograd.grad(getattr(econmt_ops, name)(inputs, (weights,))[0], leaves, given)


def theirs(inputs: torch.Tensor, hidden: int) -> Step:
    """The same of torch.nn.LSTM, which is cuDNN's."""
    module = torch.nn.LSTM(inputs.shape[2], hidden, batch_first=True).to(DEVICE, inputs.dtype)
    given = torch.randn(*inputs.shape[:2], hidden, device=DEVICE, dtype=inputs.dtype)
    leaves = [inputs, *module.parameters()]
    return lambda: torch.autograd.grad(module(inputs)[0], leaves, given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument(
        "--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"]
    )
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: B {given.batch}, T {given.steps}, H {given.hidden}"
    )
    for dtype in (getattr(torch, name) for name in given.dtype):
        torch.manual_seed(1)
        inputs = torch.randn(
            given.batch, given.steps, given.hidden, device=DEVICE, dtype=dtype, requires_grad=True
        )
        steps = {"torch.nn.LSTM": theirs(inputs, given.hidden)}
        steps |= {name: ours(name, inputs, given.hidden) for name in CELLS}
        times = milliseconds(steps, given.turns)
        for name, found in times.items():
            print(
                f"{str(dtype)[6:]:9} {name:14} {found:8.3f} ms {times['torch.nn.LSTM'] / found:6.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
