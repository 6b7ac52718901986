"""Commands ``scan`` and ``memory-task``: linear recurrences beside a copy, and memory over long sequences."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from econmt.cli.measuring import BenchSession, CsvOption, PlotOption, TypesOption, dtypes_of
from econmt.cli.options import BenchThreadsOption, DeviceOption, within
from econmt.config import limits
from econmt.errors import InputError
from scripts.bench import memory_task, scan

UNITS = [memory_task.PUBLISHED[1]]
FOR_SECONDS = within(0.0, limits.SECONDS, above=True)


def scan_command(
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="BxTxH",
            help="Rows, steps, units; may be repeated.",
            show_default="the four published",
        ),
    ] = None,
    dtypes: TypesOption = ["float32"],  # noqa: B006  typer copies it
    seconds: Annotated[
        float, typer.Option(callback=FOR_SECONDS, help="For each implementation and pass.")
    ] = 1.0,
    device: DeviceOption = "auto",
    threads: BenchThreadsOption = None,
    csv: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """Time the linear recurrence beside a copy that moves as many bytes, forward and backward.

    Every implementation is compared with float64 first.

    \b
    Example:
      python -m scripts.bench scan
      python -m scripts.bench scan --shape 1x65536x128 --csv scan.csv
    """
    wanted = [_shape_of(text) for text in shapes or []] or list(scan.SHAPES)
    place, types = BenchSession(device, threads, csv, plot), dtypes_of(dtypes)
    with place.measuring() as say:
        rows = place.kept(scan.rows(wanted, types, place.device, say, seconds=seconds))
    columns = ("batch", "steps", "hidden", "dtype", "pass", "implementation")
    figures = ("milliseconds", "highest decile", "bytes", "GB/s", "share of a copy", "difference")
    place.print(rows, (*columns, *figures), "linear recurrence")
    place.draw(
        rows, label=columns, value="share of a copy", title="linear recurrence: share of a copy's bandwidth"
    )


def _shape_of(text: str) -> scan.ScanShape:
    parts = text.split("x")
    bounds = (limits.BATCH, limits.STEPS, limits.WIDTH)
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise InputError(f"--shape '{text}': give rows, steps and units as 1x65536x128")
    sizes = [int(part) for part in parts]
    if not all(1 <= size <= most for size, most in zip(sizes, bounds, strict=True)):
        most_text = "x".join(f"{most}" for most in bounds)
        raise InputError(f"--shape '{text}': each size must be at least 1, and they at most {most_text}")
    return scan.ScanShape(*sizes)


def memory_task_command(
    steps: Annotated[
        str,
        typer.Option(metavar="T[,T...]|T..T", help="Lengths; of a range each is four times the one before."),
    ] = "1024",
    cells: Annotated[
        str, typer.Option("--cell", metavar="NAME[,NAME...]", help=f"Of: {', '.join(memory_task.CELLS)}.")
    ] = ",".join(memory_task.CELLS),
    hidden: Annotated[
        list[int], typer.Option(min=1, max=limits.WIDTH, help="Units; may be repeated.")
    ] = UNITS,
    batch: Annotated[int, typer.Option(min=1, max=limits.BATCH, help="Sequences of an update.")] = 8,
    symbols: Annotated[
        int, typer.Option(min=2, max=limits.WIDTH, help="Width of the one-hot vectors.")
    ] = memory_task.PUBLISHED[0],
    rate: Annotated[
        float, typer.Option(callback=within(0.0, limits.RATE, above=True), help="Learning rate of Adam.")
    ] = 1e-2,
    updates: Annotated[int, typer.Option(min=1, max=limits.UPDATES, help="Of a run, at most.")] = 1_000_000,
    limit: Annotated[float, typer.Option(callback=FOR_SECONDS, help="Seconds of a run, at most.")] = 1800.0,
    seed: Annotated[int, typer.Option(min=0, max=limits.SEED, help="Of parameters and sequences.")] = 1,
    device: DeviceOption = "auto",
    threads: BenchThreadsOption = None,
    csv: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """Train cells to remember the first element of long sequences: time and updates to 100 % accuracy.

    The LSTM goes first, and the others tell how much faster an update of theirs is; --plot draws that by length.

    \b
    Example:
      python -m scripts.bench memory-task --steps 256 --hidden 64 --limit 60
      python -m scripts.bench memory-task --steps 1024..1048576 --cell gilr
    """
    names = cells.split(",")
    unknown = [name for name in names if name not in memory_task.CELLS]
    if unknown:
        raise InputError(f"--cell '{unknown[0]}': give some of {', '.join(memory_task.CELLS)}")
    try:
        lengths = memory_task.lengths_of(steps)
    except ValueError:
        raise InputError(f"--steps '{steps}': give lengths as 1024, 1024,8192 or 1024..65536") from None
    if max(lengths) > limits.STEPS:
        raise InputError(f"--steps '{steps}': at most {limits.STEPS}")
    place = BenchSession(device, threads, csv, plot)
    names.sort(key=lambda name: name != memory_task.SERIAL)
    settings = [
        memory_task.Setting(name, length, size, batch, symbols, rate, seed)
        for length in lengths
        for size in hidden
        for name in names
    ]
    with place.measuring() as say, torch.enable_grad():
        rows = place.kept(memory_task.rows(settings, place.device, say, limit=limit, updates=updates))
    columns = (
        "steps", "cell", "hidden", "batch", "learnt", "updates", "seconds", "milliseconds", "set up, s",
    )  # fmt: skip
    place.print(rows, (*columns, "speed-up", "failure"), f"memory task: {memory_task.SURE} right in a row")
    if place.plot is not None:
        memory_task.draw(rows, place.plot)
