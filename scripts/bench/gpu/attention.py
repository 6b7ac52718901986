"""Times the attention and cell kernels on a GPU.

    python -m scripts.bench gpu.attention
    python -m scripts.bench gpu.attention --positions 100 16

Microseconds are those of one launch out of 50 in a CUDA graph; for the sum over steps, those of one launch for 50
steps. tests/ops/triton compares the kernels with float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.bench.gpu.frame import DEVICE, FAILURES, arguments, brief, compiled_by_workers, milliseconds

with suppress(ImportError):  # --help works without Triton
    from econmt_ops.backends.triton import attention, cells
    from econmt_ops.backends.triton.attention import AttentionLauncher, Choice, KeyGradients

STEPS = 50
SUM_TILES = [(32, 64), (16, 64), (32, 32), (16, 128), (64, 32)]


class Case(NamedTuple):
    """Configuration of a kernel."""

    kind: str
    dtype: torch.dtype
    batch: int
    size: int
    positions: int
    choice: Choice | None = None
    tile: tuple[int, int] | None = None

    def title(self) -> str:
        """Returns the left half of the line."""
        how = self.tile if self.choice is None else tuple(self.choice)
        return f"{self.kind:9} {str(self.dtype)[6:]:9} S {self.positions:3} {how!s:16}"


def cases(batch: int, size: int, positions: list[int]) -> Iterator[Case]:
    """Yields all configurations."""
    few = [Choice(16, 2), Choice(8, 2), Choice(4), Choice(8, gluon=False)]
    for dtype, choices in (
        (torch.bfloat16, [Choice(16), Choice(8), *few]),
        (torch.float32, [Choice(8), *few]),
    ):
        for count in positions:
            for choice in choices:
                yield Case("additive", dtype, batch, size, count, choice)
            for kind, choices_of_kind in (
                ("norm", (Choice(8), Choice(16, 2))),
                ("dot", (Choice(16), Choice(8))),
            ):
                for choice in choices_of_kind:
                    yield Case(kind, dtype, batch, size, count, choice)
            for tile in SUM_TILES:
                yield Case("sum", dtype, batch, size, count, tile=tile)
        yield Case("cell", dtype, batch, size, 0)


class CaseTensors:
    """Tensors of a case."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        batch, size, positions, dtype = case.batch, case.size, case.positions, case.dtype

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape) * scale).to(DEVICE, dtype)

        lengths = torch.randint(positions // 2, positions + 1, (batch,)).to(DEVICE)
        padding = torch.arange(positions, device=DEVICE) >= lengths[:, None]
        keys, values = (draw(batch, positions, size).masked_fill(padding[..., None], 0.0) for _ in range(2))
        score = None if case.kind == "dot" else (torch.randn(size) * 2 * size**-0.5).to(DEVICE)
        norm = (1 + draw(size, scale=0.1), draw(size, scale=0.1)) if case.kind == "norm" else None
        self.kernels = AttentionLauncher(keys, values, score, norm, size**-0.5, lengths, case.choice)
        self.values, self.both, self.doutput = values, draw(batch, 2 * size), draw(batch, size)


def attention_launches(case: Case) -> list[Callable[[], None]]:
    """Returns the launches of a step forward and backward."""
    tensors, size, batch = CaseTensors(case), case.size, case.batch
    both, kernels = tensors.both, tensors.kernels
    weights = both.new_empty(batch, case.positions)
    output, dboth = torch.empty_like(tensors.doutput), torch.empty_like(both)
    dscores = torch.empty(batch, case.positions, device=DEVICE)

    def forward() -> None:
        kernels.forward(both[:, :size], both[:, size:], weights, [output])

    forward()
    context = torch.bmm(weights.unsqueeze(1), tensors.values).squeeze(1)

    def backward() -> None:
        dquery, dshare = dboth[:, :size], dboth[:, size:]
        kernels.backward(
            both[:, :size], weights, context, output, [tensors.doutput], None, dquery, dshare, dscores
        )

    return [forward, backward]


def sum_launches(case: Case) -> list[Callable[[], None]]:
    """Returns the launch of the gradients that are summed over the steps, with the tile of the case."""
    if case.tile is not None:
        attention.SUM_ROWS, attention.SUM_WIDTH = case.tile[:1], case.tile[1]
    query = torch.randn(STEPS * case.batch, case.size).to(DEVICE, case.dtype)
    dscores = torch.randn(STEPS * case.batch, case.positions).to(DEVICE)
    return [partial(KeyGradients(CaseTensors(case).kernels).add, query, dscores)]


def cell_launches(case: Case) -> list[Callable[[], None]]:
    """Returns the launches of a step of an LSTM cell, forward and backward."""
    batch, size, dtype = case.batch, case.size, case.dtype
    gates = torch.randn(batch, 4 * size).to(DEVICE, dtype)
    before = torch.randn(batch, size).to(DEVICE)
    after, dc, dgates = torch.empty_like(before), torch.zeros_like(before), torch.empty_like(gates)
    h = [torch.empty(batch, 2 * size, dtype=dtype, device=DEVICE)[:, :size] for _ in range(2)]
    forward = partial(cells.forward, gates, before, after, h)
    forward()
    return [forward, partial(cells.backward, gates, before, after, h, dc, dgates)]


def launches(case: Case) -> list[Callable[[], None]]:
    """Returns the launches of a case, each made once."""
    made = {"sum": sum_launches, "cell": cell_launches}.get(case.kind, attention_launches)(case)
    for launch in made:
        launch()
    return made


def run(case: Case) -> str:
    """Times a case; returns its error if it fails, so that the others are still timed."""
    try:
        count = 3 if case.kind == "sum" else STEPS
        times = [1000 * milliseconds({"": each}, 5, repeats=count)[""] for each in launches(case)]
    except FAILURES as error:
        return brief(error)
    return "us " + " ".join(f"{time:6.2f}" for time in times)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--positions", type=int, nargs="+", default=[100, 50, 16], help="source positions")
    given = parser.parse_args()
    todo = list(cases(128, 512, given.positions))
    torch.backends.cuda.matmul.allow_tf32 = False
    if compiled_by_workers("gpu.attention", given.compile, [partial(launches, case) for case in todo]):
        return
    print("case; us of forward and backward", flush=True)
    for case in todo:
        print(case.title(), run(case), flush=True)


if __name__ == "__main__":
    main()
