"""Times LSTM layers whose rows begin anew at some steps.

    python -m scripts.bench resets                    # B 128, T 64, H 512, 3 % resets
    python -m scripts.bench resets --batch 8 --steps 20 --hidden 64 --device cpu --precision ieee

Each row is a way, of econmt_ops or of torch.nn.LSTM: milliseconds of the forward pass and of both passes with all
gradients, medians of eager calls in turns, and how many times as long as `econmt_ops.LSTM` with resets it takes.

resets           econmt_ops.LSTM with resets=, which are on the device
resets, on CPU   the same with resets on the CPU, so that the host does not wait for the device
none             econmt_ops.LSTM without resets
padded           torch.nn.LSTM on the segments between resets, each a row, padded to the longest
packed           torch.nn.LSTM on the same segments as a packed sequence
torch, none      torch.nn.LSTM without resets

What depends on the resets, such as the places of segments, is computed within each timed call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import econmt_ops
from econmt.bench.rows import Row
from scripts.bench.frame import Bench, Call, in_turns
from scripts.bench.layers import passes, relative

PRECISIONS = ("bfloat16", "tf32", "ieee")
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


def padded(module: nn.LSTM, packs: bool, inputs: Tensor, resets: Tensor) -> Tensor:
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


def ways_of(ours: econmt_ops.LSTM, theirs: nn.LSTM, on_cpu: Tensor) -> dict[str, Way]:
    """Returns the ways by name."""
    return {
        "resets": lambda inputs, resets: ours(inputs, resets=resets)[0],
        "resets, on CPU": lambda inputs, _: ours(inputs, resets=on_cpu)[0],
        "none": lambda inputs, _: ours(inputs)[0],
        "padded": partial(padded, theirs, False),
        "packed": partial(padded, theirs, True),
        "torch, none": lambda inputs, _: theirs(inputs)[0],
    }


def rows(
    precision: str, sizes: tuple[int, int, int], rate: float, turns: int, device: torch.device
) -> Iterator[Row]:
    """Yields a row for each way in a precision, for sizes B, T and H."""
    torch.manual_seed(0)
    batch, steps, hidden = sizes
    torch.backends.cudnn.allow_tf32 = precision != "ieee"
    ours = econmt_ops.LSTM(hidden, hidden, batch_first=True, device=device)
    theirs = nn.LSTM(hidden, hidden, batch_first=True, device=device)
    theirs.load_state_dict(ours.state_dict())
    on_cpu = torch.rand(batch, steps) < rate
    resets = on_cpu.to(device)
    inputs = torch.randn(batch, steps, hidden, device=device, requires_grad=True)
    calls: dict[str, dict[str, Call]] = {"forward": {}, "both": {}}
    results: dict[str, Tensor] = {}
    lowered = precision == "bfloat16"
    for name, way in ways_of(ours, theirs, on_cpu).items():

        def run(way: Way = way) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=lowered):
                return way(inputs, resets)

        module = ours if name in ("resets", "resets, on CPU", "none") else theirs
        for kind, call in passes(run, [inputs, *module.parameters()]).items():
            calls[kind][name] = call
            call()
        results[name] = run()
    exact = padded(theirs.double(), False, inputs.detach().double(), resets)
    theirs.float()
    times = {kind: in_turns(ways, device, turns=turns) for kind, ways in calls.items()}
    for name, result in results.items():
        row: Row = {"precision": precision, "way": name}
        row |= {f"{kind}, ms": 1e3 * timings[name].median for kind, timings in times.items()}
        row["x resets"] = times["both"][name].median / times["both"]["resets"].median
        yield row if "none" in name else row | {"error": f"{relative(result, exact):.1e}"}


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="auto", turns=15)
    add = bench.add_argument
    add("--batch", type=int, default=128, help="rows (%(default)s)")
    add("--steps", type=int, default=64, help="steps (%(default)s)")
    add("--hidden", type=int, default=512, help="units (%(default)s)")
    add("--rate", type=float, default=0.03, help="share of steps that are resets (%(default)s)")
    add("--precision", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    given = bench.begin(words)
    sizes = given.batch, given.steps, given.hidden
    bench.print_header(f"B {given.batch}, T {given.steps}, H {given.hidden}, {given.rate:.1%} resets")
    made = (rows(precision, sizes, given.rate, given.turns, given.device) for precision in given.precision)
    bench.report(chain.from_iterable(made))
