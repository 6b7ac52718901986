"""Times the linear recurrence's kernels in their variants beside a copy, and what ``scripts.bench scan`` times.

    python -m scripts.bench gpu.scan                          # variants of tiles first, then everything
    python -m scripts.bench gpu.scan --dtype bfloat16 --csv scan.csv
    python -m scripts.bench gpu.scan --no-others --shape 1x65536x128

Every variant is held to float64 before it is timed, its memory poisoned. Milliseconds are medians of replays of CUDA
graphs in turns with a copy that moves as many bytes; the share is the copy's time over the variant's. Variants are
"tiles" of so many steps and so many of them a group, and "walk", of which threads ask for so many steps ahead.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.bench.rows import Row, append_csv, circumstances, time_in_turns
from econmt_ops.backends.triton import recurrence
from econmt_ops.linear_recurrence import chunk
from scripts.bench import scan as bench

WORKERS = 12
DEVICE = torch.device("cuda")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Variant(NamedTuple):
    """Of the kernels: by tiles or not, steps of a block, and how many are asked for ahead, or tiles a group has."""

    tiled: bool
    block: int
    number: int

    def choose(self) -> None:
        """Let the backend run it."""
        if self.tiled:
            recurrence.RADIX = self.number
        else:
            recurrence._AHEAD = recurrence._FAR_AHEAD = self.number


def shape_of(text: str) -> bench.ScanShape:
    return bench.ScanShape(*(int(part) for part in text.split("x")))


def calls(shape: bench.ScanShape, dtype: torch.dtype, variant: Variant) -> dict[str, functools.partial]:
    """The two passes, and the backward pass that makes the outputs again."""
    decay, inputs, given = (each.detach() for each in bench.tensors_for(shape, dtype, DEVICE))
    block, tiled = variant.block, variant.tiled
    outputs, carries = recurrence.forward(decay, inputs, None, None, False, block, True, tiled)
    forward = functools.partial(recurrence.forward, decay, inputs, None, None, False, block, False, tiled)
    back = functools.partial(recurrence.backward, decay)
    rest = None, None, False, block, given, tiled
    return {
        "forward": forward,
        "backward": functools.partial(back, outputs, None, *rest),
        "backward, carries": functools.partial(back, inputs, carries, *rest),
    }


def error(found: tuple[Tensor | None, ...], wanted: tuple[Tensor, ...]) -> float:
    pairs = [(one, other) for one, other in zip(found, wanted, strict=False) if one is not None]
    return max(float((one.double() - other).norm() / other.norm()) for one, other in pairs)


@functools.cache
def check(variant: Variant, dtype: torch.dtype) -> float:
    """Against float64 at a shape with a last tile that is not full."""
    variant.choose()
    shape = bench.ScanShape(3, 600 * variant.block - 7, 48)
    exact = [each.detach().double() for each in bench.tensors_for(shape, dtype, DEVICE)]
    outputs, _ = chunk.forward(exact[0], exact[1], None, None, False, 512, False)
    gradients = chunk.backward(exact[0], outputs, None, None, None, False, 512, exact[2])
    worst = 0.0
    for name, call in calls(shape, dtype, variant).items():
        poison = [torch.full(shape, float("nan"), device=DEVICE, dtype=dtype) for _ in range(2)]
        del poison  # the allocator gives the same memory out again
        wanted = (outputs,) if name == "forward" else gradients
        worst = max(worst, error(call(), wanted))
    return worst


def variants(shape: bench.ScanShape) -> Iterator[Variant]:
    for ahead in (8, 16, 32):
        yield Variant(False, 32, ahead)
    for block, radix in ((32, 16), (32, 32)):
        if shape.steps > block:
            yield Variant(True, block, radix)


def measure(shape: bench.ScanShape, dtype: torch.dtype, seconds: float) -> Iterator[Row]:
    copies = {
        name: bench.captured(bench.copy_of(count, shape, dtype, DEVICE), DEVICE)
        for name, count in bench.TENSORS.items()
    }
    for variant in variants(shape):
        if not variant.tiled and shape.batch * shape.hidden < 2048 and shape.steps > 1 << 17:
            continue  # a few threads that walk for long: seconds a pass
        wrong = check(variant, dtype)
        variant.choose()
        row: Row = {"bench": "scan-variants", "shape": "x".join(map(str, shape)), "dtype": str(dtype)[6:]}
        row |= {**variant._asdict(), "error": wrong}
        if not wrong <= TOLERANCE[dtype]:
            yield row | {"failure": "wrong"}
            continue
        for name, call in calls(shape, dtype, variant).items():
            copy = copies[name.split(",")[0]]
            found = time_in_turns({"copy": copy, name: bench.captured(call, DEVICE)}, seconds, DEVICE)
            row[f"{name}, ms"] = 1e3 * found[name].median
            row[f"{name}, share"] = found["copy"].median / found[name].median
        yield row


def compile_all(arguments: list[str]) -> None:
    """All kernels into Triton's cache: each of several processes checks a part of the variants."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "scripts.bench.gpu.scan", *arguments, "--compile", str(number)]
        )
        for number in range(WORKERS)
    ]
    for worker in workers:
        worker.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["float32"])
    parser.add_argument("--shape", nargs="+", type=shape_of, default=list(bench.SHAPES), help="BxTxH")
    parser.add_argument("--seconds", type=float, default=0.15, help="for each pass of each variant")
    parser.add_argument("--no-others", action="store_true", help="the variants alone")
    parser.add_argument(
        "--no-variants", action="store_true", help="what python -m scripts.bench scan times alone"
    )
    parser.add_argument("--csv", type=Path, help="writes the rows there too")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.compile is not None:
        long = bench.ScanShape(1, 1 << 20, 128)
        for name, variant in [*itertools.product(given.dtype, variants(long))][given.compile :: WORKERS]:
            check(variant, getattr(torch, name))
        return
    if not given.no_variants:
        compile_all(sys.argv[1:])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms (share of a copy)")
    rows: list[Row] = []
    for name, shape in itertools.product(given.dtype, [] if given.no_variants else given.shape):
        for row in measure(shape, getattr(torch, name), given.seconds):
            rows.append(row)
            times = "  ".join(
                f"{row[f'{what}, ms']:8.3f} ({row[f'{what}, share']:4.0%})"
                for what in ("forward", "backward", "backward, carries")
                if f"{what}, ms" in row
            )
            way = f"{'tiles' if row['tiled'] else 'walk'} {row['block']:4} {row['number']:3}"
            head = f"{row['shape']:14} {row['dtype']:8} {way}"
            print(f"{head} {row['error']:8.1e} {times or row['failure']}", flush=True)
    if not given.no_others:
        types = [getattr(torch, name) for name in given.dtype]
        for row in bench.rows(given.shape, types, DEVICE, lambda _: None, seconds=given.seconds):
            rows.append(row)
            place = f"{row['batch']}x{row['steps']}x{row['hidden']}"
            print(
                f"{place:14} {row['dtype']:8} {row['pass']:8} {row['implementation']:26} {row['milliseconds']:9.3f}"
                f" ({row['share of a copy']:4.0%})",
                flush=True,
            )
    if given.csv is not None:
        append_csv(given.csv, rows, circumstances(DEVICE))


if __name__ == "__main__":
    main()
