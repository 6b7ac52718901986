"""Times and checks the attention and cell kernels on a GPU.

    python -m scripts.bench gpu.attention
    TRITON_INTERPRET=1 python -m scripts.bench gpu.attention --batch 2 --size 16 --positions 20   # no GPU: checks only

Every configuration is compared with float64 and then timed in a CUDA graph. Microseconds are those of one launch out of
50 in a graph; for the sum over steps, those of one launch for 50 steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.bench.gpu.frame import FAILURES, arguments, brief, compiled_by_workers, milliseconds
from scripts.bench.layers import relative

with suppress(ImportError):  # --help works without Triton
    from econmt_ops.backends.triton import attention, cells
    from econmt_ops.backends.triton.attention import AttentionLauncher, Choice, KeyGradients

STEPS = 50
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
IS_TIMED = DEVICE == "cuda" and "--compile" not in sys.argv
"""False without a GPU and in a worker that compiles."""
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
            for choice in choices if DEVICE == "cuda" else choices[-1:]:
                yield Case("additive", dtype, batch, size, count, choice)
            others = ("norm", Choice(8)), ("norm", Choice(16, 2)), ("dot", Choice(16)), ("dot", Choice(8))
            for kind, choice in others if DEVICE == "cuda" else ():
                yield Case(kind, dtype, batch, size, count, choice)
            for tile in SUM_TILES:
                yield Case("sum", dtype, batch, size, count, tile=tile)
        yield Case("cell", dtype, batch, size, 0)


def time_launches(launch: Callable[[], None], count: int) -> float:
    """Returns the microseconds of one of ``count`` launches in a graph; nan if nothing is timed."""
    if not IS_TIMED:
        return float("nan")
    return 1000 * milliseconds({"": launch}, 5, repeats=count)[""]


class CaseTensors:
    """Tensors of a case."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        batch, size, positions, dtype = case.batch, case.size, case.positions, case.dtype

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape) * scale).to(DEVICE, dtype)

        self.lengths = torch.randint(positions // 2, positions + 1, (batch,)).to(DEVICE)
        self.padding = torch.arange(positions, device=DEVICE) >= self.lengths[:, None]
        self.keys = draw(batch, positions, size).masked_fill(self.padding[..., None], 0.0)
        self.values = draw(batch, positions, size).masked_fill(self.padding[..., None], 0.0)
        self.score = None if case.kind == "dot" else (torch.randn(size) * 2 * size**-0.5).to(DEVICE)
        self.norm = (1 + draw(size, scale=0.1), draw(size, scale=0.1)) if case.kind == "norm" else None
        self.kernels = AttentionLauncher(
            self.keys, self.values, self.score, self.norm, size**-0.5, self.lengths, case.choice
        )
        self.both, self.doutput = draw(batch, 2 * size), draw(batch, size)

    def reference(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Returns weights, output and the gradients of query, keys and score, in float64."""
        size = self.case.size
        query, keys = (tensor.double().requires_grad_() for tensor in (self.both[:, :size], self.keys))
        score = None if self.score is None else self.score.double().requires_grad_()
        if score is None:
            scores = size**-0.5 * torch.einsum("ba,bsa->bs", query, keys)
        else:
            hidden = query.unsqueeze(1) + keys
            if self.norm is not None:
                gain, shift = (part.double() for part in self.norm)
                hidden = torch.nn.functional.layer_norm(hidden, (size,), gain, shift)
            scores = torch.tanh(hidden) @ score
        weights = scores.masked_fill(self.padding, -1e9).softmax(1).masked_fill(self.padding, 0.0)
        context = torch.einsum("bs,bsh->bh", weights, self.values.double())
        output = torch.tanh(self.both[:, size:].double() + context)
        leaves = [query, keys] if score is None else [query, keys, score]
        gradients = torch.autograd.grad(output, leaves, self.doutput.double())
        return weights.detach(), output.detach(), list(gradients)


def run_attention(case: Case) -> str:
    """Checks and times forward and backward."""
    tensors, size, batch = CaseTensors(case), case.size, case.batch
    both, kernels = tensors.both, tensors.kernels
    exact_weights, exact_output, exact = tensors.reference()
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

    backward()
    errors = [relative(weights, exact_weights), relative(output, exact_output)]
    errors.append(relative(dboth[:, :size], exact[0]))
    if tensors.score is not None:
        sums = KeyGradients(kernels)
        sums.add(both[:, :size], dscores)
        errors += [relative(sums.keys, exact[1]), relative(sums.vectors()[0], exact[2])]
    times = [time_launches(launch, STEPS) for launch in (forward, backward)]
    return f"us {times[0]:6.2f} {times[1]:6.2f}   errors " + " ".join(f"{error:.1e}" for error in errors)


def run_sum(case: Case) -> str:
    """Checks and times the gradients that are summed over the steps, with the tile of the case."""
    if case.tile is not None:
        attention.SUM_ROWS, attention.SUM_WIDTH = case.tile[:1], case.tile[1]
    tensors = CaseTensors(case)
    steps = STEPS if DEVICE == "cuda" else 2
    query = torch.randn(steps * case.batch, case.size).to(DEVICE, case.dtype)
    dscores = torch.randn(steps * case.batch, case.positions).to(DEVICE)
    sums = KeyGradients(tensors.kernels)
    sums.add(query, dscores)
    hidden = torch.zeros(case.batch, case.positions, case.size, dtype=torch.float64, device=DEVICE)
    for row, dscore in zip(query.split(case.batch), dscores.split(case.batch), strict=True):
        t = torch.tanh(row.double().unsqueeze(1) + tensors.keys.double())
        hidden += dscore.double().unsqueeze(2) * (1 - t * t)
    assert tensors.score is not None
    error = relative(sums.keys, hidden * tensors.score.double())
    return f"us {time_launches(lambda: sums.add(query, dscores), 3):6.1f}          errors {error:.1e}"


def run_cell(case: Case) -> str:
    """Checks and times a step of an LSTM cell, forward and backward."""
    batch, size, dtype = case.batch, case.size, case.dtype
    gates = torch.randn(batch, 4 * size).to(DEVICE, dtype)
    before = torch.randn(batch, size).to(DEVICE)
    after, dc = torch.empty_like(before), torch.zeros_like(before)
    h = [torch.empty(batch, 2 * size, dtype=dtype, device=DEVICE)[:, :size] for _ in range(2)]
    dgates = torch.empty_like(gates)
    leaves = [gates.double().requires_grad_(), before.double().requires_grad_()]
    i, f, g, o = leaves[0].chunk(4, 1)
    c = f.sigmoid() * leaves[1] + i.sigmoid() * g.tanh()
    exact = o.sigmoid() * c.tanh()
    cells.forward(gates, before, after, h)
    cells.backward(gates, before, after, h, dc, dgates)
    wanted = torch.autograd.grad(exact, leaves, 2 * h[0].double())
    errors = relative(h[0], exact.detach()), relative(dgates, wanted[0]), relative(dc, wanted[1])
    times = [
        time_launches(lambda: cells.forward(gates, before, after, h), STEPS),
        time_launches(lambda: cells.backward(gates, before, after, h, dc, dgates), STEPS),
    ]
    return f"us {times[0]:6.2f} {times[1]:6.2f}   errors " + " ".join(f"{error:.1e}" for error in errors)


def run(case: Case) -> str:
    """Checks and times a case; returns its error if it fails, so that the others are still timed."""
    try:
        return {"sum": run_sum, "cell": run_cell}.get(case.kind, run_attention)(case)
    except FAILURES as error:
        return brief(error)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=128, help="rows of a batch (%(default)s)")
    parser.add_argument("--size", type=int, default=512, help="units of decoder and attention (%(default)s)")
    parser.add_argument("--positions", type=int, nargs="+", default=[100, 50, 16], help="source positions")
    given = parser.parse_args()
    todo = list(cases(given.batch, given.size, given.positions))
    torch.backends.cuda.matmul.allow_tf32 = False
    jobs = [partial(run, case) for case in todo]
    if DEVICE == "cuda" and compiled_by_workers("gpu.attention", given.compile, jobs):
        return
    print("case; us of forward and backward; errors of weights, output, dquery, dkeys, dscore", flush=True)
    for case in todo:
        print(case.title(), run(case), flush=True)


if __name__ == "__main__":
    main()
