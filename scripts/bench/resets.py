"""Times recurrent layers whose rows begin anew at steps.

    python -m scripts.bench resets                    # B 128, T 64, H 512, 3 % resets
    python -m scripts.bench resets --batch 8 --steps 20 --hidden 64 --device cpu --precision ieee
    python -m scripts.bench resets --batch 65536 --steps 128 --inputs 32 --hidden 256 --precision tf32 --forward \\
        --kind GRU --only resets torchrl

Each row is a way, of econmt_ops or of torch.nn: milliseconds of the forward pass and of both passes with all
gradients, medians of eager calls in turns, and how many times as long as econmt_ops with resets it takes.

resets           econmt_ops with resets=, which are on the device
resets, on CPU   the same with resets on the CPU, so that the host does not wait for the device
none             econmt_ops without resets
padded           torch.nn on the segments between resets, each a row, padded to the longest
packed           torch.nn on the same segments as a packed sequence
torch, none      torch.nn without resets
torchrl, ...     TorchRL's module with each of its backends, where TorchRL is installed; it also returns the state
                 after each segment

What depends on the resets, such as the places of segments, is computed within each timed call. The last command has
the sizes of TorchRL's own benchmark (benchmarks/test_rnn_reset_backends_benchmark.py).
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import econmt_ops
from econmt.bench.rows import Row
from scripts.bench.drop_in import PRECISIONS
from scripts.bench.frame import FAILURES, Bench, Call, brief, in_turns
from scripts.bench.layers import passes, relative

BACKENDS = ("pad", "scan", "scan compiled", "triton")
"""Backends of TorchRL's modules, one of them also by torch.compile."""
CHECKED = 64
"""Rows that are compared with float64."""
Way = Callable[[Tensor, Tensor], Tensor]
"""Function of inputs (B, T, I) and resets (B, T) that returns outputs (B, T, H)."""


def segments_of(resets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the segment (B, T) of each position, its place in it, and the lengths of all segments."""
    begins = resets.clone()
    begins[:, 0] = True
    segment = begins.flatten().cumsum(0).view(resets.shape) - 1
    number = torch.arange(resets.shape[1], device=resets.device).expand_as(resets)
    first = torch.where(begins, number, 0).cummax(1).values
    return segment, number - first, torch.bincount(segment.flatten())


def padded(module: nn.RNNBase, packs: bool, inputs: Tensor, resets: Tensor) -> Tensor:
    """Runs the segments as rows of their own, padded or packed."""
    segment, place, lengths = segments_of(resets)
    longest = int(lengths.max())
    rows = inputs.new_zeros(len(lengths), longest, inputs.shape[2])
    rows = rows.index_put((segment, place), inputs)
    if packs:
        outputs = module(pack_padded_sequence(rows, lengths.cpu(), True, enforce_sorted=False))[0]
        made, _ = pad_packed_sequence(outputs, True, total_length=longest)
    else:
        made = module(rows)[0]
    return made[segment, place]


def by_torchrl(module: nn.RNNBase, zeros: Tensor, backend: str) -> Way:
    """Returns TorchRL's module around another; ``zeros`` (B, T, 1, H) are the states that resets begin with."""
    states = [f"state{number}" for number in range(2 if module.mode == "LSTM" else 1)]
    layer = getattr(importlib.import_module("torchrl.modules"), f"{module.mode}Module")(
        **{module.mode.lower(): module},
        in_keys=["inputs", *states],
        out_keys=["outputs", *(("next", state) for state in states)],
        recurrent_backend=backend.split()[0],
        default_recurrent_mode=True,
    )
    layer = torch.compile(layer) if backend.endswith("compiled") else layer

    def run(inputs: Tensor, resets: Tensor) -> Tensor:
        given = {"inputs": inputs, "is_init": resets.unsqueeze(2), **dict.fromkeys(states, zeros)}
        outputs: Tensor = layer(importlib.import_module("tensordict").TensorDict(given, resets.shape))[
            "outputs"
        ]
        return outputs

    return run


def ways_of(ours: Any, theirs: nn.RNNBase, on_cpu: Tensor) -> dict[str, Way]:
    """Returns the ways by name."""
    ways: dict[str, Way] = {
        "resets": lambda inputs, resets: ours(inputs, resets=resets)[0],
        "resets, on CPU": lambda inputs, _: ours(inputs, resets=on_cpu)[0],
        "none": lambda inputs, _: ours(inputs)[0],
        "padded": partial(padded, theirs, False),
        "packed": partial(padded, theirs, True),
        "torch, none": lambda inputs, _: theirs(inputs)[0],
    }
    if importlib.util.find_spec("torchrl"):
        zeros = torch.zeros(*on_cpu.shape, 1, theirs.hidden_size, device=next(theirs.parameters()).device)
        ways |= {f"torchrl, {backend}": by_torchrl(theirs, zeros, backend) for backend in BACKENDS}
    return ways


def rows(precision: str, given: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each way in a precision."""
    torch.manual_seed(0)
    device, sizes = given.device, (given.inputs or given.hidden, given.hidden)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision != "ieee"
    layer = f"{given.kind} {given.batch} x {given.steps} x {given.hidden}"
    ours = getattr(econmt_ops, given.kind)(*sizes, batch_first=True, device=device)
    theirs = getattr(nn, given.kind)(*sizes, batch_first=True, device=device)
    theirs.load_state_dict(ours.state_dict())
    on_cpu = torch.rand(given.batch, given.steps) < given.rate
    resets = on_cpu.to(device)
    inputs = torch.randn(given.batch, given.steps, sizes[0], device=device, requires_grad=not given.forward)
    exact = padded(
        copy.deepcopy(theirs).double(), False, inputs[:CHECKED].detach().double(), resets[:CHECKED]
    )
    calls: dict[str, dict[str, Call]] = {"forward": {}} if given.forward else {"forward": {}, "both": {}}
    made: dict[str, Row] = {}
    for name, way in ways_of(ours, theirs, on_cpu).items():
        if not any(part in name for part in given.only):
            continue
        made[name] = {"layer": layer, "precision": precision, "way": name}

        def run(way: Way = way) -> Tensor:
            lowered = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
            with lowered, torch.inference_mode(given.forward):
                return way(inputs, resets)

        module = theirs if "torch" in name or name in ("padded", "packed") else ours
        both = passes(run, [inputs, *module.parameters()])
        try:
            for kind, named in calls.items():
                both[kind]()
                named[name] = both[kind]
            if "none" not in name:
                made[name]["error"] = f"{relative(both['forward']()[:CHECKED], exact):.1e}"
        except FAILURES as error:
            made[name]["failure"] = brief(error)
    for kind, named in calls.items():
        timings = in_turns(named, device, turns=given.turns)
        for name, timing in timings.items():
            made[name][f"{kind}, ms"] = 1e3 * timing.median
            made[name]["x resets"] = timing.median / timings["resets"].median
    yield from made.values()


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="auto", turns=15)
    add = bench.add_argument
    add("--kind", choices=("LSTM", "GRU"), default="LSTM", help="kind of the layer (%(default)s)")
    add("--batch", type=int, default=128, help="rows (%(default)s)")
    add("--steps", type=int, default=64, help="steps (%(default)s)")
    add("--inputs", type=int, help="width of the inputs (that of the layer)")
    add("--hidden", type=int, default=512, help="units (%(default)s)")
    add("--rate", type=float, default=0.03, help="share of steps that are resets (%(default)s)")
    add("--precision", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    add("--forward", action="store_true", help="the forward pass alone, in inference mode")
    add("--only", nargs="+", default=[""], metavar="PART", help="only ways whose names contain one of these")
    given = bench.begin(words)
    bench.print_header(f"{given.rate:.1%} resets")
    bench.report(chain.from_iterable(rows(precision, given) for precision in given.precision))
