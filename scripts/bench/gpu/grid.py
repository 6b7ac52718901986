"""Times one LSTM layer over the published grid of shapes beside cuDNN, both in CUDA graphs.

    python -m scripts.bench gpu.grid                      # every LSTM shape of econmt's grid, both types
    python -m scripts.bench gpu.grid --dtype bfloat16 --csv grid.csv

The shapes are those of ``econmt bench select --grid``: batches of 1 to 512, hidden sizes of 128 to 1,024, lengths of
5 to 100. *ours* is what ``econmt_ops.lstm`` runs with no option in a captured step, *cuDNN* is torch.nn.LSTM in the
same type; float32 is IEEE float32 for both, or, with --tf32, both may use TF32. Forward and backward with all
gradients, milliseconds, medians of replays in turns. Kernels are compiled first, in several processes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import econmt_ops
from econmt.bench.rows import Row, append_csv, circumstances
from econmt.bench.selection import GridEntry, grid
from econmt_ops import LSTMWeights
from econmt_ops.dispatch.capture import Capturer
from econmt_ops.dispatch.rule import captured

DEVICE = torch.device("cuda")
WORKERS = 12
Step = Callable[[], object]


def ours(entry: GridEntry) -> Step:
    """A layer of `econmt_ops.lstm`, forward and backward."""
    dtype, hidden = getattr(torch, entry.dtype), entry.hidden
    inputs = torch.randn(entry.batch, entry.length, hidden, device=DEVICE, dtype=dtype, requires_grad=True)
    shapes = ((4 * hidden, hidden), (4 * hidden, hidden), (4 * hidden,))
    layer = LSTMWeights(
        *(
            torch.randn(shape, device=DEVICE, dtype=dtype).mul_(hidden**-0.5).requires_grad_()
            for shape in shapes
        )
    )
    given = torch.randn_like(inputs)
    leaves = [inputs, *(part for part in layer if part is not None)]
    return lambda: torch.autograd.grad(econmt_ops.lstm(inputs, (layer,))[0], leaves, given)


def cudnn(entry: GridEntry) -> Step:
    """The same of torch.nn.LSTM."""
    dtype = getattr(torch, entry.dtype)
    module = torch.nn.LSTM(entry.hidden, entry.hidden).to(DEVICE, dtype)
    inputs = torch.randn(
        entry.length, entry.batch, entry.hidden, device=DEVICE, dtype=dtype, requires_grad=True
    )
    given = torch.randn_like(inputs)
    leaves = [inputs, *module.parameters()]
    return lambda: torch.autograd.grad(module(inputs)[0], leaves, given)


def milliseconds(steps: dict[str, Step], turns: int) -> dict[str, float]:
    """Of a replay of each, the median over turns of as many replays as take about a millisecond."""
    capturer, graphs = Capturer(DEVICE), {}
    for name, step in steps.items():
        with capturer.warming_up():
            step()
            step()
        graphs[name], _ = capturer.capture(step)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    repeats = dict.fromkeys(graphs, 1)
    for _ in range(turns + 1):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeats[name]):
                graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / repeats[name])
            repeats[name] = max(1, round(1.0 / samples[name][-1]))
    return {name: sorted(found[1:])[turns // 2] for name, found in samples.items()}


def compile_all(arguments: list[str]) -> None:
    """All kernels into Triton's cache: each of several processes runs a part of the shapes once."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "scripts.bench.gpu.grid", *arguments, "--compile", str(number)]
        )
        for number in range(WORKERS)
    ]
    for worker in workers:
        worker.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"]
    )
    parser.add_argument("--tf32", action="store_true", help="allows TF32 in float32 layers, as PyTorch does")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--csv", type=Path, help="writes the rows there too")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, given.tf32
    entries = [entry for entry in grid() if entry.op == "lstm" and entry.dtype in given.dtype]
    if given.compile is not None:
        for entry in entries[given.compile :: WORKERS]:
            with captured():
                ours(entry)()
        torch.cuda.synchronize()
        return
    compile_all(sys.argv[1:])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: LSTM layer, forward + backward, ms")
    print(f"{'B':>5}{'T':>5}{'H':>6} {'type':10}{'ours':>8}{'cuDNN':>8}{'faster':>8}")
    rows: list[Row] = []
    for entry in entries:
        torch.manual_seed(1)
        times = milliseconds({"ours": ours(entry), "cudnn": cudnn(entry)}, given.turns)
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
