"""Times the attention and cell kernels on a GPU.

    python -m scripts.bench gpu.attention
    python -m scripts.bench gpu.attention --positions 100 16

Microseconds are those of one launch out of 50 in a CUDA graph; for the sum over steps, those of one launch for 50
steps. tests/ops/triton compares the kernels with float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.bench.rows import Row
from econmt_ops.backends.protocol import AttentionBackward, AttentionInputs
from scripts.bench.frame import CUDA, Bench, figures_of, milliseconds

with suppress(ImportError):  # --help works without Triton
    from econmt_ops.backends.triton import cells
    from econmt_ops.backends.triton.attention import Choice, TritonAttention

STEPS = 50


class Case(NamedTuple):
    """Kernel and its sizes; ``plain`` is True for the kernel in plain Triton."""

    kind: str
    dtype: torch.dtype
    batch: int
    size: int
    positions: int
    plain: bool = False


def cases(batch: int, size: int, positions: list[int]) -> Iterator[Case]:
    """Yields all kernels."""
    for dtype in (torch.bfloat16, torch.float32):
        for count, kind in itertools.product(positions, ("additive", "norm", "dot", "sum")):
            yield Case(kind, dtype, batch, size, count)
            if kind == "additive":
                yield Case(kind, dtype, batch, size, count, plain=True)
        yield Case("cell", dtype, batch, size, 0)


class CaseTensors:
    """Tensors of a case."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        batch, size, positions, dtype = case.batch, case.size, case.positions, case.dtype

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape) * scale).to(CUDA, dtype)

        lengths = torch.randint(positions // 2, positions + 1, (batch,)).to(CUDA)
        padding = torch.arange(positions, device=CUDA) >= lengths[:, None]
        keys, values = (draw(batch, positions, size).masked_fill(padding[..., None], 0.0) for _ in range(2))
        score = None if case.kind == "dot" else (torch.randn(size) * 2 * size**-0.5).to(CUDA)
        norm = (1 + draw(size, scale=0.1), draw(size, scale=0.1)) if case.kind == "norm" else None
        choice = Choice(8, gluon=False) if case.plain else None
        self.kernels = TritonAttention(
            AttentionInputs(keys, values, score, norm, size**-0.5, lengths), choice
        )
        self.values, self.both, self.doutput = values, draw(batch, 2 * size), draw(batch, size)


def attention_launches(case: Case) -> list[Callable[[], None]]:
    """Returns the launches of a step forward and backward."""
    tensors, size, batch = CaseTensors(case), case.size, case.batch
    both, kernels = tensors.both, tensors.kernels
    weights = both.new_empty(batch, case.positions)
    output, dboth = torch.empty_like(tensors.doutput), torch.empty_like(both)
    dscores = torch.empty(batch, case.positions, device=CUDA)

    def forward() -> None:
        kernels.attend(both[:, :size], both[:, size:], weights, [output])

    forward()
    context = torch.bmm(weights.unsqueeze(1), tensors.values).squeeze(1)

    def backward() -> None:
        gradients = [tensors.doutput], None, dboth, dscores
        kernels.backward(AttentionBackward(both[:, :size], context, weights, output, *gradients))

    return [forward, backward]


def sum_launches(case: Case) -> list[Callable[[], None]]:
    """Returns the launch of the gradients that are summed over the steps."""
    query = torch.randn(STEPS * case.batch, case.size).to(CUDA, case.dtype)
    dscores = torch.randn(STEPS * case.batch, case.positions).to(CUDA)
    return [partial(CaseTensors(case).kernels.key_gradients, query, dscores)]


def cell_launches(case: Case) -> list[Callable[[], None]]:
    """Returns the launches of a step of an LSTM cell, forward and backward."""
    batch, size, dtype = case.batch, case.size, case.dtype
    gates = torch.randn(batch, 4 * size).to(CUDA, dtype)
    before = torch.randn(batch, size).to(CUDA)
    after, dc, dgates = torch.empty_like(before), torch.zeros_like(before), torch.empty_like(gates)
    h = [torch.empty(batch, 2 * size, dtype=dtype, device=CUDA)[:, :size] for _ in range(2)]
    forward = partial(cells.forward, gates, before, after, h)
    forward()
    return [forward, partial(cells.backward, gates, before, after, h, dc, dgates)]


def launches(case: Case) -> list[Callable[[], None]]:
    """Returns the launches of a case, each made once."""
    made = {"sum": sum_launches, "cell": cell_launches}.get(case.kind, attention_launches)(case)
    for launch in made:
        launch()
    return made


def row_of(case: Case) -> Row:
    """Times a case."""

    def measure() -> Row:
        count = 3 if case.kind == "sum" else STEPS
        times = (1000 * milliseconds({"": each}, 5, repeats=count)[""] for each in launches(case))
        return dict(zip(("forward, us", "backward, us"), times, strict=False))

    name = f"{case.kind}, plain Triton" if case.plain else case.kind
    return {"kernel": name, "dtype": str(case.dtype)[6:], "S": case.positions} | figures_of(measure)


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, compiles=True)
    bench.add_argument("--positions", type=int, nargs="+", default=[100, 50, 16], help="source positions")
    given = bench.begin(words)
    bench.device = CUDA
    todo = list(cases(128, 512, given.positions))
    torch.backends.cuda.matmul.allow_tf32 = False
    if not bench.compiled([partial(launches, case) for case in todo]):
        bench.report(map(row_of, todo))
