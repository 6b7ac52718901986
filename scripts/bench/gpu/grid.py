"""Times an LSTM layer against cuDNN over a grid of shapes.

    python -m scripts.bench gpu.grid                      # every LSTM shape of econmt's grid, both types
    python -m scripts.bench gpu.grid --dtype bfloat16 --csv grid.csv

The shapes are those of ``econmt bench select --grid``: batches of 1 to 512, hidden sizes of 128 to 1,024, lengths of
5 to 100. *ours* is ``econmt_ops.lstm`` without options in a captured step, *cuDNN* is torch.nn.LSTM in the same type;
float32 is IEEE float32 for both or, with --tf32, TF32 is allowed for both. Figures are milliseconds of forward and
backward with all gradients in CUDA graphs, medians of replays in turns. Kernels are compiled first, in several
processes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

import econmt_ops
from econmt.bench.rows import Row, append_csv, circumstances
from econmt.bench.selection import GridEntry, grid
from econmt_ops import LSTMWeights
from econmt_ops.dispatch.rule import captured
from scripts.bench.gpu.frame import DEVICE, Call, arguments, compiled_by_workers, heading, milliseconds
from scripts.bench.gpu.lstm import cudnn, leaves, passes


def ours(entry: GridEntry) -> Call:
    """Returns both passes of a layer of `econmt_ops.lstm`."""
    dtype, hidden = getattr(torch, entry.dtype), entry.hidden
    inputs = torch.randn(entry.batch, entry.length, hidden, device=DEVICE, dtype=dtype, requires_grad=True)
    shapes = ((4 * hidden, hidden), (4 * hidden, hidden), (4 * hidden,))
    layer = LSTMWeights(
        *(
            torch.randn(shape, device=DEVICE, dtype=dtype).mul_(hidden**-0.5).requires_grad_()
            for shape in shapes
        )
    )
    run = lambda: econmt_ops.lstm(inputs, (layer,))[0]  # noqa: E731
    return passes(run, [inputs, *leaves(layer)], torch.randn_like(inputs))["both"]


def compiling(entry: GridEntry) -> None:
    """Runs a shape once, as in a captured step."""
    with captured():
        ours(entry)()


def main() -> None:
    parser, types = arguments(__doc__), ("bfloat16", "float32")
    parser.add_argument(
        "--dtype", nargs="+", choices=types, default=list(types), help="types of weights and inputs"
    )
    parser.add_argument("--tf32", action="store_true", help="allow TF32 in float32 layers, as PyTorch does")
    parser.add_argument("--turns", type=int, default=9, help="timed samples of each layer (%(default)s)")
    parser.add_argument("--csv", type=Path, help="file to which the rows are appended")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, given.tf32
    entries = [entry for entry in grid() if entry.op == "lstm" and entry.dtype in given.dtype]
    if compiled_by_workers("gpu.grid", given.compile, [partial(compiling, entry) for entry in entries]):
        return
    print(f"{heading()}: LSTM layer, forward + backward, ms")
    print(f"{'B':>5}{'T':>5}{'H':>6} {'type':10}{'ours':>8}{'cuDNN':>8}{'faster':>8}")
    rows: list[Row] = []
    for entry in entries:
        torch.manual_seed(1)
        theirs = cudnn(entry.batch, entry.hidden, getattr(torch, entry.dtype), steps=entry.length)["both"]
        times = milliseconds({"ours": ours(entry), "cudnn": theirs}, given.turns)
        faster = times["cudnn"] / times["ours"]
        rows.append({"bench": "lstm-grid", **entry._asdict(), **times, "faster": faster})
        print(
            f"{entry.batch:5}{entry.length:5}{entry.hidden:6} {entry.dtype:10}{times['ours']:8.3f}{times['cudnn']:8.3f}"
            f"{faster:7.2f}x",
            flush=True,
        )
    for dtype in given.dtype:
        ratios = sorted(float(row["faster"]) for row in rows if row["dtype"] == dtype)
        print(
            f"{dtype}: {len(ratios)} shapes, {ratios[0]:.2f}x to {ratios[-1]:.2f}x, median "
            f"{ratios[len(ratios) // 2]:.2f}x, {sum(ratio < 0.95 for ratio in ratios)} more than 5 % slower"
        )
    if given.csv is not None:
        append_csv(given.csv, rows, circumstances(DEVICE))


if __name__ == "__main__":
    main()
