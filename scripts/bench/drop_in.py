"""Compares econmt_ops.LSTM and GRU with those of torch.nn.

    python -m scripts.bench drop-in --device cpu
    python -m scripts.bench drop-in --device cuda --precision bfloat16

Each line is a module and its sizes: median milliseconds of eager calls in turns, with all gradients, and MB (10^6
bytes) allocated at the peak of a call beyond its arguments. "recompute" is econmt_ops with implementation="recompute".
"ragged" rows have lengths spread from T / 4 to T: econmt_ops gets lengths=, torch.nn a packed sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import econmt_ops
from scripts.bench.arguments import parser_of
from scripts.bench.gpu.frame import heading
from scripts.bench.layers import Call, in_turns, passes, peak_bytes


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
    Case("LSTM", 16, 20, 64),
    Case("LSTM", 32, 50, 256),
    Case("LSTM", 64, 100, 512),
    Case("LSTM", 32, 50, 256, 2, True),
    Case("LSTM", 32, 50, 256, ragged=True),
    Case("GRU", 32, 50, 256),
    Case("GRU", 64, 100, 512),
    Case("GRU", 32, 50, 256, ragged=True),
)


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


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--turns", type=int, default=9, help="timed samples of each (%(default)s)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    given = parser.parse_args()
    print(f"{heading(given.device)}, {given.precision}; milliseconds and MB")
    names = ("econmt_ops", "recompute", "torch.nn")
    print(f"{'module, B x T x H x layers':36}", *(f"{name:>18}" for name in names), f"{'faster':>8}")
    for case in CASES:
        calls = calls_of(case, given.precision == "bfloat16", given.device)
        for call in calls.values():
            call()
        peaks = {name: peak_bytes(call, given.device) / 1e6 for name, call in calls.items()}
        times = {
            name: 1e3 * timing.median for name, timing in in_turns(calls, given.turns, given.device).items()
        }
        cells = [f"{times[name]:9.2f} {peaks[name]:8.1f}" for name in names]
        print(f"{case.name:36}", *cells, f"{times['torch.nn'] / times['econmt_ops']:7.2f}x", flush=True)


if __name__ == "__main__":
    main()
