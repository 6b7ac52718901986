"""Times a layer of every cell against torch.nn.LSTM.

    OMP_NUM_THREADS=1 python -m scripts.bench cells --turns 5

Both passes run on the CPU, in turns in one process, and the fastest turn counts. Seconds are those of the processor
(all threads), which other processes disturb little, or those of the clock with --wall.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

import econmt_ops
from econmt_ops.cells.table import CELLS
from scripts.bench.arguments import parser_of


def way(name: str, inputs: torch.Tensor, hidden: int, how: dict[str, str]) -> Callable[[], None]:
    """Returns a forward and backward pass of a layer."""
    cell = CELLS[name]
    shapes = cell.parameter_shapes(inputs.shape[2], hidden).values()
    weights = cell.weights(*((torch.randn(shape) * 0.03).requires_grad_() for shape in shapes))
    gradient = torch.randn(*inputs.shape[:2], hidden)

    def run() -> None:
        outputs, _ = getattr(econmt_ops, name)(inputs, (weights,), **how)
        outputs.backward(gradient)

    return run


def ways(batch: int, steps: int, hidden: int) -> dict[str, Callable[[], None]]:
    """Returns the passes to time, torch.nn.LSTM first."""
    inputs = torch.randn(batch, steps, hidden, requires_grad=True)
    theirs = nn.LSTM(hidden, hidden, batch_first=True)
    gradient = torch.randn(batch, steps, hidden)
    found: dict[str, Callable[[], None]] = {"torch.nn.LSTM": lambda: theirs(inputs)[0].backward(gradient)}
    for name in CELLS:
        for how in ({"implementation": "reference"}, {"implementation": "recompute", "stash": "gates"}):
            found[f"{name}, {how['implementation']}"] = way(name, inputs, hidden, how)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--wall", action="store_true", help="measure wall-clock time, not processor time")
    given = parser.parse_args()
    torch.manual_seed(1)
    clock = time.perf_counter if given.wall else time.process_time
    functions = ways(given.batch, given.steps, given.hidden)
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(given.turns):
        for name, function in functions.items():
            begin = clock()
            function()
            best[name] = min(best[name], clock() - begin)
    first = next(iter(best.values()))
    print(f"B {given.batch}, T {given.steps}, H {given.hidden}, float32, {torch.get_num_threads()} threads")
    for name, seconds in best.items():
        print(f"{name:22} {1000 * seconds:8.1f} ms  {first / seconds:5.2f}x")


if __name__ == "__main__":
    main()
