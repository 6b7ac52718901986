"""Compares econmt_ops.LSTM and GRU with those of torch.nn.

    python -m scripts.bench drop-in --device cpu
    python -m scripts.bench drop-in --device cuda --precision bfloat16

Each row is a module and its sizes: median milliseconds of eager calls in turns, with all gradients, and MB (10^6
bytes) allocated at the peak of a call beyond its arguments. "recompute" is econmt_ops with implementation="recompute".
"ragged" rows have lengths spread from T / 4 to T: econmt_ops gets lengths=, torch.nn a packed sequence.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import econmt_ops
from econmt.bench.rows import Row
from scripts.bench.frame import Bench, Call, in_turns, ratio_of
from scripts.bench.layers import passes, peak_bytes


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


def calls_of(case: Case, lowered: bool, device: torch.device) -> dict[str, Call]:
    """Returns both passes of a case by econmt_ops, with recomputation, and by torch.nn."""
    torch.manual_seed(0)
    sizes = case.hidden, case.hidden, case.layers
    options: dict[str, Any] = {"bidirectional": case.bidirectional, "device": device}
    inputs = torch.randn(case.steps, case.batch, case.hidden, device=device, requires_grad=True)
    lengths = torch.linspace(case.steps // 4, case.steps, case.batch).long() if case.ragged else None
    modules: dict[str, Any] = {"econmt_ops": getattr(econmt_ops, case.kind)(*sizes, **options)}
    modules["recompute"] = getattr(econmt_ops, case.kind)(*sizes, **options, implementation="recompute")
    modules["torch.nn"] = getattr(nn, case.kind)(*sizes, **options)

    def both(module: Any) -> Call:
        def run() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=lowered):
                if lengths is None:
                    outputs: Tensor = module(inputs)[0]
                    return outputs
                if isinstance(module, nn.LSTM | nn.GRU):
                    packed = module(pack_padded_sequence(inputs, lengths, enforce_sorted=False))[0]
                    return packed.data  # type: ignore[no-any-return]
                return module(inputs, lengths=lengths)[0]  # type: ignore[no-any-return]

        return passes(run, [inputs, *module.parameters()])["both"]

    return {name: both(module) for name, module in modules.items()}


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """Yields the row of each case."""
    for case in CASES:
        calls = calls_of(case, given.precision == "bfloat16", given.device)
        for call in calls.values():
            call()
        row: Row = {"module, B x T x H x layers": case.name}
        timings = in_turns(calls, given.device, turns=given.turns)
        for name, call in calls.items():
            row[f"{name}, ms"] = 1e3 * timings[name].median
            row[f"{name}, MB"] = peak_bytes(call, given.device) / 1e6
        yield row | {"faster": str(ratio_of(timings["torch.nn"].samples, timings["econmt_ops"].samples))}


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="cpu", turns=9)
    bench.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    given = bench.begin(words)
    bench.print_header(given.precision)
    bench.report(rows(given), "milliseconds and MB")
