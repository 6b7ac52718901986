"""Times the persistent LSTM kernel against cuDNN.

    python -m scripts.bench gpu.lstm            # under 150 seconds, compiling included
    python -m scripts.bench gpu.lstm 128x1024   # only these batches and hidden sizes

All kernels are compiled in several processes first. Then layers of 100 steps are timed in CUDA graphs. "ms" are whole
layers, products and gradients included; "us a step" are microseconds of the recurrence alone, the time of its kernels.
A case that fails prints a line below the table.
tests/ops/triton/test_persistent_sizes.py compares these sizes with float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from econmt.bench.rows import Row
from econmt_ops.dispatch.device_limits import limits_of
from econmt_ops.products.stack import StackOptions
from scripts.bench.frame import CUDA, Bench, Call, figures_of, milliseconds
from scripts.bench.layers import kernel_times, lstm_weights, passes, torch_lstm

with suppress(ImportError):  # --help works without Triton
    from econmt_ops.lstm import triton

STEPS = 100
SIZES = ["64x512", "128x512", "64x1024", "128x1024", "64x256", "128x256"]
"""Batches and hidden sizes."""
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32 with fp16 products": torch.float32}


def layer(
    batch: int, hidden: int, dtype: torch.dtype, layers: int = 1, steps: int = STEPS
) -> dict[str, Call]:
    """Returns the passes of econmt's layers."""
    torch.manual_seed(1)
    stack = tuple(lstm_weights(hidden, torch.float32, CUDA) for _ in range(layers))
    inputs = torch.randn(batch, steps, hidden, device=CUDA).to(dtype).requires_grad_()
    zero = torch.zeros(batch, hidden, device=CUDA)
    state = tuple((zero.to(dtype), zero) for _ in stack)

    def run() -> Tensor:
        return triton.lstm(inputs, stack, state, StackOptions(from_zero=True))[0]

    return passes(run, [inputs, *(part for each in stack for part in each)], torch.randn_like(inputs))


def directions(batch: int, hidden: int, steps: int = STEPS) -> dict[str, Call]:
    """Returns the passes of a bidirectional layer."""
    ahead, back = (lstm_weights(hidden, torch.float32, CUDA) for _ in range(2))
    inputs = torch.randn(batch, steps, hidden, device=CUDA, dtype=torch.bfloat16, requires_grad=True)

    def run() -> Tensor:
        return triton.lstm(inputs, (ahead, back), (), StackOptions(from_zero=True, both_ways=True))[0]

    incoming = torch.randn(batch, steps, 2 * hidden, device=CUDA, dtype=torch.bfloat16)
    return passes(run, [inputs, *ahead, *back], incoming)


def attempt(name: str, make: Callable[..., dict[str, Call]], *sizes: Any) -> Row:
    """Returns the milliseconds of both passes."""
    return {"what": name} | figures_of(
        lambda: {f"{way}, ms": f"{taken:.3f}" for way, taken in milliseconds(make(*sizes)).items()}
    )


def layer_rows(batch: int, hidden: int, layers: int = 1) -> Iterator[Row]:
    """Yields the times of econmt and cuDNN."""
    sizes: Row = {"layers": layers, "B": batch, "H": hidden}
    types = TYPES if layers == 1 else {"bf16": torch.bfloat16}
    for name, dtype in types.items():
        yield sizes | attempt(f"econmt {name}", layer, batch, hidden, dtype, layers)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", torch.float32)):
        yield sizes | attempt(f"cuDNN {name}", torch_lstm, batch, STEPS, hidden, dtype, CUDA, layers)


def recurrence_row(batch: int, hidden: int) -> Row:
    """Returns the microseconds a step that the recurrence's kernels take in bfloat16."""

    def measure() -> Row:
        both = layer(batch, hidden, torch.bfloat16)["both"]
        both()
        microseconds = {"forward": 0.0, "backward": 0.0}
        for each, way in itertools.product(kernel_times(both), microseconds):
            microseconds[way] += each.microseconds if f"lstm_{way}" in each.name else 0.0
        return {f"{way}, us a step": used / STEPS for way, used in microseconds.items()}

    row: Row = {"layers": 1, "B": batch, "H": hidden, "what": "recurrence alone, bf16"}
    return row | figures_of(measure)


def jobs(sizes: list[tuple[int, int]]) -> list[Call]:
    """Returns calls that compile every kernel, in layers of two steps."""
    made: list[Call] = []
    for batch, hidden in sizes:
        made += [lambda sizes=(batch, hidden, each, 1, 2): layer(*sizes)["both"]() for each in TYPES.values()]
    return [*made, lambda: directions(64, 512, 2)["both"]()]


def rows(sizes: list[tuple[int, int]]) -> Iterator[Row]:
    """Yields the rows of all sizes, and of four layers and of two directions beside the first size."""
    for batch, hidden in sizes:
        yield from layer_rows(batch, hidden)
        yield recurrence_row(batch, hidden)
    if (64, 512) in sizes:
        yield from layer_rows(64, 512, 4)
        for batch in (64, 128):
            yield {"layers": 1, "B": batch, "H": 512, **attempt("both directions", directions, batch, 512)}


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, compiles=True)
    bench.add_argument("sizes", nargs="*", metavar="BATCHxHIDDEN", help=f"some of {', '.join(SIZES)}")
    given = bench.begin(words)
    bench.device = CUDA
    sizes = [(int(b), int(h)) for b, h in (text.split("x") for text in given.sizes or SIZES)]
    torch.backends.cuda.matmul.allow_tf32 = True
    if bench.compiled(jobs(sizes)):
        return
    bench.print_header(limits_of(CUDA))
    bench.report(rows(sizes))
