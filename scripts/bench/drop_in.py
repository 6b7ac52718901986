"""Compares econmt_ops.LSTM and GRU with those of torch.nn.

    python -m scripts.bench drop-in
    python -m scripts.bench drop-in --device cuda --precision bfloat16 tf32 ieee

Each row is a module and its sizes, with all gradients: median milliseconds of eager calls in turns, MB (10^6 bytes)
allocated at the peak of a call beyond its arguments, and the largest error of outputs and gradients against float64,
relative to the norm of the exact values. "recompute" is econmt_ops with implementation="recompute". "ragged" rows have
lengths spread from T / 4 to T: econmt_ops gets lengths=, torch.nn a packed sequence.

On a GPU there are more sizes. Precisions are autocast to bfloat16, and float32 with TF32 allowed in cuDNN, as
by default, or forbidden (ieee).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import econmt_ops
from econmt.bench.rows import Row
from scripts.bench.frame import CUDA, Bench, in_turns, ratio_of
from scripts.bench.layers import passes, peak_bytes, relative

PRECISIONS = ("bfloat16", "tf32", "ieee")


class Case(NamedTuple):
    """Class of the module, its sizes, and whether rows are ragged."""

    kind: str
    batch: int
    steps: int
    hidden: int
    layers: int = 1
    bidirectional: bool = False
    ragged: bool = False

    @property
    def name(self) -> str:
        """Text of the first column."""
        words = f"{self.kind} {self.batch} x {self.steps} x {self.hidden} x {self.layers}"
        return words + " both ways" * self.bidirectional + " ragged" * self.ragged


CASES = (
    Case("LSTM", 16, 20, 64), Case("LSTM", 32, 50, 256), Case("LSTM", 64, 100, 512),
    Case("LSTM", 32, 50, 256, 2, True), Case("LSTM", 32, 50, 256, ragged=True), Case("GRU", 32, 50, 256),
    Case("GRU", 64, 100, 512), Case("GRU", 32, 50, 256, ragged=True),
)  # fmt: skip
ON_GPU = tuple(
    Case(kind, *sizes)
    for kind in ("LSTM", "GRU") for sizes in (
        (256, 50, 128), (64, 100, 512, 2), (16, 1024, 768), (128, 100, 1024), (1, 1024, 512), (256, 256, 128),
        (32, 35, 200), (32, 35, 200, 2),
    )
)  # fmt: skip


class Way:
    """Both passes of a module, eager: outputs (B, T, H), and all gradients."""

    def __init__(
        self, library: Any, case: Case, precision: str, device: torch.device, **options: Any
    ) -> None:
        torch.manual_seed(0)
        batch, steps, hidden = case[1:4]
        self._sizes: dict[str, Any] = {
            "bidirectional": case.bidirectional,
            "device": device,
            "batch_first": True,
        }
        self._case, self._lowered = case, precision == "bfloat16"
        self._module = self._made(library, **options)
        self._inputs = torch.randn(batch, steps, hidden, device=device, requires_grad=True)
        self._lengths = torch.linspace(steps // 4, steps, batch).long() if case.ragged else None

    def _made(self, library: Any, **options: Any) -> Any:
        case = self._case
        return getattr(library, case.kind)(case.hidden, case.hidden, case.layers, **self._sizes, **options)

    def __call__(self) -> tuple[Tensor, ...]:
        """Returns outputs and gradients."""
        return self._both(self._module, self._inputs, self._lowered)

    def _both(self, module: Any, inputs: Tensor, lowered: bool) -> tuple[Tensor, ...]:
        def run() -> Tensor:
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=lowered):
                if self._lengths is None:
                    return module(inputs)[0]  # type: ignore[no-any-return]
                if isinstance(module, nn.LSTM | nn.GRU):
                    packed = pack_padded_sequence(inputs, self._lengths, True, enforce_sorted=False)
                    return module(packed)[0].data  # type: ignore[no-any-return]
                return module(inputs, lengths=self._lengths)[0]  # type: ignore[no-any-return]

        made: tuple[Tensor, ...] = passes(run, [inputs, *module.parameters()])["both"]()
        return made

    def error(self) -> float:
        """Returns the largest error of outputs and gradients against float64; those of ragged rows are not compared."""
        exact = self._made(nn).double()
        exact.load_state_dict(self._module.state_dict())
        wanted = self._both(exact, self._inputs.detach().double().requires_grad_(), False)
        return max(map(relative, self(), wanted))


def allow_tf32(precision: str) -> None:
    """Sets PyTorch's switches; products outside of cuDNN have IEEE float32, as by default."""
    torch.backends.cudnn.allow_tf32 = precision != "ieee"
    torch.backends.cuda.matmul.allow_tf32 = False


def row_of(case: Case, precision: str, device: torch.device, turns: int) -> Row:
    """Returns the row of a case."""
    allow_tf32(precision)
    ways = {
        "econmt_ops": Way(econmt_ops, case, precision, device),
        "torch.nn": Way(nn, case, precision, device),
    }
    ways["recompute"] = Way(econmt_ops, case, precision, device, implementation="recompute")
    row: Row = {"module, B x T x H x layers": case.name, "precision": precision}
    errors = {} if case.ragged else {name: f"{way.error():.1e}" for name, way in ways.items()}
    timings = in_turns(ways, device, turns=turns)
    for name, way in ways.items():
        row[f"{name}, ms"], row[f"{name}, MB"] = 1e3 * timings[name].median, peak_bytes(way, device) / 1e6
        row[f"{name}, error"] = errors.get(name, "")
    return row | {"faster": str(ratio_of(timings["torch.nn"].samples, timings["econmt_ops"].samples))}


def compile_kernels(case: Case, precision: str) -> None:
    """Runs a layer once over a few steps, which compiles its kernels."""
    allow_tf32(precision)
    Way(econmt_ops, case._replace(steps=4), precision, CUDA)()


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="cpu", turns=9, compiles=True)
    bench.add_argument("--precision", nargs="+", default=["ieee"], choices=PRECISIONS)
    given = bench.begin(words)
    with_gpu = given.device.type == "cuda"
    todo = list(itertools.product((*CASES, *ON_GPU) if with_gpu else CASES, given.precision))
    if with_gpu and bench.compiled([partial(compile_kernels, *each) for each in todo]):
        return
    bench.print_header(" ".join(given.precision))
    bench.report((row_of(*each, given.device, given.turns) for each in todo), "milliseconds and MB")
