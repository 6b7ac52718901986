"""Times LSTM and GRU layers at other packages' shapes.

    python -m scripts.bench recurrent deepbench --device cuda
    python -m scripts.bench recurrent flashrnn --device cuda --precision bfloat16

A row is a layer in a precision: milliseconds of the forward pass, which keeps nothing, and of both passes with all
gradients, the product with the inputs, which are as wide as the layer, among them; medians in turns, on a GPU in CUDA
graphs. Each side has its inputs as it likes them. "x" is the fastest other side's time over econmt_ops's, and an error
the largest of outputs and gradients against float64, relative to the norm of the exact values.

layers: LSTM layers of 100 steps, and a stack of four, beside torch.nn's.
deepbench: the LSTM and GRU layers that DeepBench lists for training (code/kernels/rnn_problems.h), beside torch.nn's.
flashrnn: FlashRNN's own shapes (16 rows of 768 units, 1,024 steps) and others, beside FlashRNN where it is installed;
each of its backends is called eagerly, and has no figure where it fails. Its layers of several heads have
block-diagonal recurrent matrices, which econmt_ops and torch.nn multiply with their zeros.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import econmt_ops
from econmt.bench.rows import Row
from econmt_ops.dispatch.rule import captured
from scripts.bench.frame import CUDA, FAILURES, Bench, Call, brief, figures_of, in_turns, replayed
from scripts.bench.layers import passes, relative

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32}
"""Types of weights and inputs by precision."""
OURS, LIBRARY, PEER = "econmt_ops", "torch.nn", "flashrnn"
BACKENDS = {"cuda_fused": 1024, "triton_fused": 64}
"""Fastest backends of FlashRNN, and the most units of a head that each can train."""
CHECKED = 400
"""Most steps that are compared with float64, except beside FlashRNN."""


class Case(NamedTuple):
    """Kind of a layer, its units, rows and steps, the blocks of its recurrent matrix, and the number of layers."""

    kind: str
    hidden: int
    batch: int
    steps: int
    heads: int = 1
    layers: int = 1


SETS = {
    "layers": (
        *(Case("LSTM", hidden, batch, 100) for hidden in (512, 1024, 256) for batch in (64, 128)),
        Case("LSTM", 512, 64, 100, layers=4),
    ),
    "deepbench": (
        *(Case("LSTM", hidden, batch, 25) for hidden in (512, 1024) for batch in (16, 32, 64, 128)),
        *(Case("LSTM", 1536, batch, 50) for batch in (8, 16, 32)),
        *(Case("LSTM", 256, batch, 150) for batch in (16, 32, 64)),
        *(Case("LSTM", hidden, batch, 25) for hidden in (2048, 4096) for batch in (16, 32, 64, 128)),
        Case("GRU", 512, 32, 1),
        *(Case("GRU", hidden, 32, steps) for steps in (187, 375) for hidden in (1536, 2048, 2560, 2816)),
        *(Case("GRU", 1024, batch, 1500) for batch in (32, 64)),
        *(Case("GRU", hidden, 32, steps) for steps in (750, 1500) for hidden in (1536, 2048, 2560, 2816)),
    ),
    "flashrnn": (
        *(Case("LSTM", 768, 16, 1024, heads) for heads in (1, 12, 3)),
        Case("LSTM", 512, 64, 100),
        Case("LSTM", 1024, 128, 100),
    ),
}


class Side:
    """Layer of ``econmt_ops`` or ``torch.nn``, with the same values on both sides.

    Attributes:
        rows_first: True if inputs and outputs are (B, T, H), of ``torch.nn`` (T, B, H).
    """

    def __init__(self, library: Any, case: Case, precision: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.rows_first = library is econmt_ops
        source = getattr(nn, case.kind)(case.hidden, case.hidden, case.layers, device=device)
        block = torch.ones(case.hidden // case.heads, case.hidden // case.heads, device=device)
        gates = len(source.weight_hh_l0) // case.hidden
        source.weight_hh_l0.data *= torch.block_diag(*[block] * case.heads).repeat(gates, 1)
        self.module: Any = getattr(library, case.kind)(
            case.hidden, case.hidden, case.layers, batch_first=self.rows_first, device=device
        )
        self.module.load_state_dict(source.state_dict())
        self.module.to(TYPES[precision])
        sizes = 2, case.batch, case.steps, case.hidden
        inputs, incoming = torch.randn(sizes, device=device).to(TYPES[precision])
        self.inputs, self.incoming = self.turned(inputs).contiguous(), self.turned(incoming).contiguous()
        self.inputs.requires_grad_()

    def turned(self, rows: Tensor) -> Tensor:
        """Changes between (B, T, H) and the layout of the layer."""
        return rows if self.rows_first else rows.transpose(0, 1)

    def passes(self) -> dict[str, Call]:
        """Returns the passes of the layer."""
        leaves = [self.inputs, *self.module.parameters()]
        return passes(lambda: self.module(self.inputs)[0], leaves, self.incoming)

    def results(self) -> list[Tensor]:
        """Returns outputs (B, T, H) and the gradients of inputs (B, T, H), bottom weights and bias."""
        outputs, inputs, *weights = self.passes()["both"]()
        return [self.turned(outputs), self.turned(inputs), *weights[:3]]

    def exact(self) -> list[Tensor]:
        """Returns the results in float64."""
        other = copy.copy(self)
        other.module, other.incoming = copy.deepcopy(self.module).double(), self.incoming.double()
        other.inputs = self.inputs.detach().double().requires_grad_()
        return other.results()

    def arranged(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns results in the layout of this side's."""
        return results


class FlashRNN(Side):
    """Layer of FlashRNN, with the values of another side, in the layouts that a backend has inside.

    Letters of its layouts: T steps, B rows, G gates, H heads, D units of a head, P units of the step before, S states.
    """

    def __init__(self, backend: str, like: Side, case: Case, precision: str) -> None:
        package = importlib.import_module("flashrnn.flashrnn")
        self._run, self._heads = package.flashrnn, case.heads
        make = partial(
            package.FlashRNNConfig,
            hidden_dim=case.hidden,
            num_heads=case.heads,
            batch_size=case.batch,
            function=case.kind.lower(),
            backend=backend,
            dtype=precision,
        )
        names = [f"{name}_shape" for name in ("input", "recurrent", "bias")]
        self._shapes = {name: getattr(make(), f"_internal_{name}") for name in names}
        self._config = make(output_shape="STBHD", **self._shapes)
        self.rows_first = self._shapes["input_shape"].startswith("B")
        self.inputs, self.incoming = (
            self.turned(like.turned(each.detach())).contiguous() for each in (like.inputs, like.incoming)
        )
        read, recurrent, bias, other = (each.detach() for each in like.module.parameters())
        values = self.arranged([self.inputs, self.inputs, read, recurrent, bias + other])[2:]
        self._leaves = [each.contiguous().requires_grad_() for each in (self.inputs, *values)]

    def _permuted(self, values: Tensor, letters: str, wanted: str) -> Tensor:
        return values.permute([letters.index(letter) for letter in wanted])

    def arranged(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `Side.arranged`; of the recurrent matrix these are the blocks."""
        *rows, read, recurrent, bias = results
        sizes = (4, self._heads, -1)
        gates = self._shapes["input_shape"][2:]
        read = self._permuted(read.unflatten(0, sizes), "GHDI", f"{gates}I").flatten(0, 2)
        blocks = recurrent.unflatten(1, sizes[1:]).unflatten(0, sizes).diagonal(dim1=1, dim2=3)
        recurrent = self._permuted(blocks, "GDPH", self._shapes["recurrent_shape"])
        return [
            *rows,
            read,
            recurrent,
            self._permuted(bias.unflatten(0, sizes), "GHD", self._shapes["bias_shape"]),
        ]

    def passes(self) -> dict[str, Call]:
        """See `Side.passes`."""
        inputs, read, recurrent, bias = self._leaves
        gates = {"G": 4, "H": self._heads, "D": -1}
        sizes = [gates[letter] for letter in self._shapes["input_shape"][2:]]

        def run() -> Tensor:
            sums = nn.functional.linear(inputs, read).unflatten(2, sizes)
            h = self._run(sums, recurrent, bias, config=self._config)[0][0]
            outputs: Tensor = h.flatten(2)
            return self.turned(outputs.transpose(0, 1))

        return passes(run, self._leaves, self.incoming)


def row_of(case: Case, precision: str, device: torch.device, turns: int, with_peer: bool) -> Row:
    """Returns the row of a layer in a precision."""
    allow_tf32(precision)
    short = case if with_peer else case._replace(steps=min(case.steps, CHECKED))
    sides, checked = (
        {
            name: Side(library, each, precision, device)
            for name, library in ((OURS, econmt_ops), (LIBRARY, nn))
        }
        for each in (case, short)
    )
    expected, errors, notes = checked[LIBRARY].exact(), {}, []
    for backend, most in BACKENDS.items():
        if with_peer and precision != "tf32" and case.hidden <= most * case.heads:
            try:
                peer = FlashRNN(backend, sides[LIBRARY], case, precision)
                peer.results()
                sides[f"{PEER} {backend}"] = checked[f"{PEER} {backend}"] = peer
            except FAILURES as error:
                notes.append(f"{backend}: {brief(error)}")
    for name, side in checked.items():
        errors[f"{name}, error"] = f"{max(map(relative, side.results(), side.arranged(expected))):.1e}"
    row: Row = {"layer": f"{case.kind} {case.hidden} x {case.batch} x {case.steps}", "precision": precision}
    row |= {"heads": case.heads, "layers": case.layers}
    del checked, expected
    for what, suffix in (("forward", " forward"), ("both", "")):
        runs = {name: side.passes()[what] for name, side in sides.items()}
        calls = {name: run if PEER in name else replayed(run, device) for name, run in runs.items()}
        timings = in_turns(calls, device, turns=turns)
        row |= {f"{name}{suffix}, ms": 1e3 * timing.median for name, timing in timings.items()}
        others = [timing.median for name, timing in timings.items() if name != OURS]
        row[f"x{suffix}"] = min(others) / timings[OURS].median
    return row | errors | {"note": "; ".join(notes)}


def allow_tf32(precision: str) -> None:
    """Allows products of float32 in TF32, in cuDNN and elsewhere, or forbids them."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


def compile_kernels(case: Case, precision: str) -> None:
    """Runs a layer once over a few steps, which compiles its kernels."""
    allow_tf32(precision)
    with captured():
        Side(econmt_ops, case._replace(steps=4), precision, CUDA).results()


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="cpu", turns=5, compiles=True, parts=SETS)
    bench.add_argument("--precision", nargs="+", default=list(TYPES), choices=TYPES)
    given = bench.begin(words)
    on_gpu = given.device.type == "cuda"
    todo = [(part, *each) for part in given.parts for each in itertools.product(SETS[part], given.precision)]
    if on_gpu and bench.compiled([partial(compile_kernels, *each) for _, *each in todo]):
        return
    has_peer = on_gpu and importlib.util.find_spec(PEER) is not None
    bench.print_header()
    with captured(on_gpu):
        bench.report(
            figures_of(partial(row_of, case, precision, given.device, given.turns, has_peer and part == PEER))
            for part, case, precision in todo
        )
