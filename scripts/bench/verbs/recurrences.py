"""Commands ``scan`` and ``memory-task``: linear recurrences beside a copy, and memory over long sequences."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from econmt.cli.measuring import BenchSession, Dtypes, dtypes_of
from econmt.cli.option_groups import option, with_option_groups
from econmt.config import limits
from econmt.errors import InputError
from scripts.bench import memory_task, scan

UNITS = [memory_task.PUBLISHED[1]]
Seconds = Annotated[float, Field(gt=0.0, le=limits.SECONDS)]


@with_option_groups
def scan_command(
    *,
    shapes: list[str] | None = option(
        None,
        "--shape",
        help="Rows, steps, units; may be repeated.",
        metavar="BxTxH",
        show_default="the four published",
    ),
    dtypes: Dtypes = ["float32"],  # noqa: B006  typer copies it
    seconds: Seconds = option(1.0, help="For each implementation and pass."),
    session: BenchSession,
) -> None:
    """Time the linear recurrence beside a copy that moves as many bytes, forward and backward.

    Every implementation is compared with float64 first.

    \b
    Example:
      python -m scripts.bench scan
      python -m scripts.bench scan --shape 1x65536x128 --csv scan.csv
    """
    wanted = [_shape_of(text) for text in shapes or []] or list(scan.SHAPES)
    types = dtypes_of(dtypes)
    with session.measuring() as say:
        rows = session.kept(scan.rows(wanted, types, session.device, say, seconds=seconds))
    columns = ("batch", "steps", "hidden", "dtype", "pass", "implementation")
    figures = ("milliseconds", "highest decile", "bytes", "GB/s", "share of a copy", "difference")
    session.print(rows, (*columns, *figures), "linear recurrence")
    session.draw(
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


@with_option_groups
def memory_task_command(
    *,
    steps: str = option(
        "1024", help="Lengths; of a range each is four times the one before.", metavar="T[,T...]|T..T"
    ),
    cells: str = option(
        ",".join(memory_task.CELLS),
        "--cell",
        help=f"Of: {', '.join(memory_task.CELLS)}.",
        metavar="NAME[,NAME...]",
    ),
    hidden: list[int] = option(UNITS, help="Units; may be repeated.", min=1, max=limits.WIDTH),
    batch: int = option(8, help="Sequences of an update.", min=1, max=limits.BATCH),
    symbols: int = option(
        memory_task.PUBLISHED[0], help="Width of the one-hot vectors.", min=2, max=limits.WIDTH
    ),
    rate: Annotated[float, Field(gt=0.0, le=limits.RATE)] = option(1e-2, help="Learning rate of Adam."),
    updates: int = option(1_000_000, help="Of a run, at most.", min=1, max=limits.UPDATES),
    limit: Seconds = option(1800.0, help="Seconds of a run, at most."),
    seed: limits.Seed = option(1, help="Of parameters and sequences."),
    session: BenchSession,
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
    names.sort(key=lambda name: name != memory_task.SERIAL)
    settings = [
        memory_task.Setting(name, length, size, batch, symbols, rate, seed)
        for length in lengths
        for size in hidden
        for name in names
    ]
    with session.measuring() as say, torch.enable_grad():
        rows = session.kept(memory_task.rows(settings, session.device, say, limit=limit, updates=updates))
    columns = (
        "steps", "cell", "hidden", "batch", "learnt", "updates", "seconds", "milliseconds", "set up, s",
    )  # fmt: skip
    session.print(rows, (*columns, "speed-up", "failure"), f"memory task: {memory_task.SURE} right in a row")
    if session.plot is not None:
        memory_task.draw(rows, session.plot)
