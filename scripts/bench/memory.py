"""Measures memory and time of recomputing training steps.

Three sections, all of them unless --only names some:

step        training steps of recipes with each implementation and stash, in turns; medians and quartiles
checkpoint  further rows of these tables: the same decoder with torch.utils.checkpoint, written by hand
output      econmt_ops.linear_cross_entropy against cross_entropy(linear(...)) of torch.nn.functional

Loss and gradient norm of each variant are compared with the reference's before it is timed. The learning rate is 0, so
that all variants see the same parameters. Examples:

    python -m scripts.bench memory --device cuda --output memory.json
    python -m scripts.bench memory --only step checkpoint --recipes iwslt --lengths 100x100 --variants "all, outputs"
    ECONMT_DATA=FOLDER python -m scripts.bench memory --only step --recipes multi30k --lengths text
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from econmt.config.recipe import load_recipe
from econmt.engine.devices import reproducible, resolve_device
from econmt.errors import EconmtError, InputError
from econmt.memory.measure.machine import describe_machine
from econmt.memory.report.tables import format_bytes, format_rate
from econmt.training.interrupts import Interrupts
from econmt_ops import linear_cross_entropy
from econmt_ops.backends.compiled import has_compiler
from scripts.bench.arguments import parser_of
from scripts.bench.lstm import peak_bytes
from scripts.bench.memory_steps import (
    Case,
    Clock,
    Steps,
    Variant,
    ceiling,
    checkpoint_variants,
    free,
    make_case,
    now,
    resident_peak,
    spread,
    step_variants,
    take_turns,
)

NO_TIME = "not measured: no time left"
SECTIONS = ("step", "checkpoint", "output")
TIMED_POSITIONS = 3000
"""Most target positions of a batch that is timed on the CPU: larger ones take many seconds a step.

Compiled variants, which keep the same tensors as the others, are left out with larger batches."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative difference of loss and gradient norm from the reference in float32."""


class MismatchError(Exception):
    """A variant whose results differ from the reference's."""


def agree(name: str, found: Sequence[float], wanted: Sequence[float], tolerance: float) -> None:
    """Raises MismatchError if loss or gradient norm differ from the reference's by more than the tolerance."""
    for what, own, other in zip(("loss", "gradient norm"), found, wanted, strict=True):
        if not abs(own - other) <= tolerance * abs(other):
            raise MismatchError(f"{name}: {what} {own:.9g}, the reference has {other:.9g}")


def measure_case(case: Case, variants: list[Variant], device: torch.device, clock: Clock) -> dict[str, Any]:
    """Measures the table of one recipe's steps."""
    steps = Steps(case, device)
    positions = max(batch.target_output.numel() for batch in steps.batches)
    timed = device.type == "cuda" or positions <= TIMED_POSITIONS
    reference = variants[0]
    ledgers = [steps.ledger(reference, batch) for batch in steps.batches]
    wanted = steps.values(reference)
    needed = sum(ledger.flops for ledger in ledgers)
    if not timed:
        variants = [variant for variant in variants if "compiled" not in variant.name]
    rows: list[dict[str, Any]] = []
    for variant in variants:
        row: dict[str, Any] = {
            "name": variant.name,
            "precision": str(variant.precision).removeprefix("torch."),
        }
        rows.append(row)
        if clock.over:
            row["failure"] = NO_TIME
            continue
        begin = time.monotonic()
        try:
            agree(variant.name, steps.values(variant), wanted, TOLERANCE[variant.precision])
            if timed:
                steps.turn(variant)
                row["warm_up_seconds"] = time.monotonic() - begin
            if device.type == "cuda":
                row["stash_bytes"], row["peak_bytes"] = steps.allocated(variant)
            else:
                ledger = steps.ledger(variant, steps.largest)
                row |= {"stash_bytes": ledger.stashed, "peak_bytes": ledger.peak, "flops": ledger.flops}
                row["stash_bytes_by_layer"] = dict(ledger.stash)
                row["process_bytes"] = resident_peak(partial(steps.run, variant, steps.largest))
        except torch.cuda.OutOfMemoryError:
            row["failure"] = "out of memory"
        steps.forget()
        print(
            f"{case.name}: {variant.name}, {row['precision']}: {time.monotonic() - begin:.1f} s",
            file=sys.stderr,
        )
    good = [(variant, row) for variant, row in zip(variants, rows, strict=True) if "failure" not in row]
    if timed:
        runs = {f"{variant.name} {variant.precision}": partial(steps.turn, variant) for variant, _ in good}
        seconds = list(take_turns(runs, clock).values())
        for (variant, row), own in zip(good, seconds, strict=True):
            row |= spread(own, seconds[0])
            row["tokens_per_second"] = 1000.0 * steps.tokens / row["milliseconds"]
            row["share"] = 1000.0 * needed / row["milliseconds"] / ceiling(device, variant.precision)
    vocabulary = " and ".join(f"{size:,}" for size in case.sizes)
    return {
        "products_milliseconds": steps.products(reference) if timed and device.type == "cpu" else None,
        "recipe": case.name,
        "shapes": case.lengths,
        "note": f"{case.note}; vocabularies {vocabulary}",
        "target_tokens": steps.tokens,
        "flops": needed,
        "rows": rows,
    }


def measure_output(quick: bool, device: torch.device, clock: Clock) -> dict[str, Any]:
    """Measures the output layer alone."""
    rows_count, width, vocabulary = (40, 8, 50) if quick else (6400, 512, 32000)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows_count, width, generator=generator).to(device).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to(device).requires_grad_()
    targets = torch.randint(vocabulary, (rows_count,), generator=generator).to(device)
    names = ["recompute"] + (["compiled"] if has_compiler() and not quick else [])
    losses: dict[str, Callable[[], Tensor]] = {
        "cross_entropy(linear)": lambda: functional.cross_entropy(functional.linear(hidden, weight), targets)
    }
    for name in names:
        losses[name] = partial(linear_cross_entropy, hidden, weight, targets, implementation=name)
    gradients = hidden.nbytes + weight.nbytes
    found = torch.zeros(())

    def run(name: str) -> float:
        nonlocal found
        hidden.grad = weight.grad = None
        begin = now(device)
        found = losses[name]()
        torch.autograd.backward(found)
        found = found.detach()
        return now(device) - begin

    wanted: Sequence[float] = ()
    rows: list[dict[str, Any]] = []
    for name in losses:
        run(name)
        assert hidden.grad is not None
        assert weight.grad is not None
        values = float(found), float((hidden.grad.norm() ** 2 + weight.grad.norm() ** 2).sqrt())
        wanted = wanted or values
        agree(name, values, wanted, TOLERANCE[torch.float32])
        hidden.grad = weight.grad = None
        free(device)
        peak = peak_bytes(partial(run, name), device) - gradients
        rows.append({"name": name, "precision": "float32", "peak_bytes": peak})
    seconds = take_turns({name: partial(run, name) for name in losses}, clock)
    flops = 6 * rows_count * width * vocabulary
    for row in rows:
        row |= spread(seconds[row["name"]], seconds["cross_entropy(linear)"])
        row["share"] = 1000.0 * flops / row["milliseconds"] / ceiling(device, torch.float32)
    return {"shape": [rows_count, width, vocabulary], "flops": flops, "rows": rows}


def show(
    title: str, rows: Sequence[dict[str, Any]], columns: dict[str, Callable[[dict[str, Any]], str]]
) -> None:
    """Prints a table; a cell without a figure stays empty."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = []
        for cell in columns.values():
            try:
                cells.append(cell(row))
            except KeyError:
                cells.append("")
        if "failure" in row:
            cells[-1] = row["failure"]
        table.add_row(row["name"], *cells)
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=150)).print(table)


def _less(first: dict[str, Any], key: str) -> Callable[[dict[str, Any]], str]:
    """Returns a column that tells how many times smaller a byte count is than in the first row."""
    return lambda row: f"{first[key] / max(row[key], 1):.2f}x"


def _time(row: dict[str, Any]) -> str:
    digits = 0 if row["milliseconds"] >= 100 else 1
    low, high = (f"{value:,.{digits}f}" for value in row["quartiles"])
    return f"{row['milliseconds']:,.{digits}f} ({low} to {high})"


TIMES: dict[str, Callable[[dict[str, Any]], str]] = {
    "ms (quartiles)": _time,
    "speed": lambda row: f"{row['speed']:.2f}x",
    "of peak": lambda row: f"{100 * row['share']:.0f} %",
}


def show_steps(found: dict[str, Any]) -> None:
    """Prints a table of steps."""
    first = found["rows"][0]
    columns = {
        "precision": lambda row: row["precision"],
        "stash": lambda row: format_bytes(row["stash_bytes"]),
        "less": _less(first, "stash_bytes"),
        "peak": lambda row: format_bytes(row["peak_bytes"]),
        "less ": _less(first, "peak_bytes"),
        "process": lambda row: format_bytes(row["process_bytes"] or 0),
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        **TIMES,
    }
    show(f"step of {found['recipe']}, {found['shapes']} ({found['note']})", found["rows"], columns)
    if found["products_milliseconds"] is not None:
        share = found["products_milliseconds"] / first["milliseconds"]
        print(
            f"matrix products of the reference: {found['products_milliseconds']:,.1f} ms, {share:.0%} of its time"
        )


def show_output(found: dict[str, Any]) -> None:
    """Prints the table of the output layer."""
    first = found["rows"][0]
    columns = {
        "peak above inputs and gradients": lambda row: format_bytes(row["peak_bytes"]),
        "less": _less(first, "peak_bytes"),
        **TIMES,
    }
    show(
        f"output layer, {' x '.join(f'{size:,}' for size in found['shape'])}, float32", found["rows"], columns
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = parser_of(__doc__)
    add, types = parser.add_argument, ("float32", "bfloat16")
    add("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to measure")
    add("--device", default="auto")
    add("--recipes", nargs="+", help="default: iwslt groundhog best, on the CPU multi30k too")
    add("--lengths", nargs="+", help="text, or source x target positions as 100x80; default: the longest")
    add("--precisions", nargs="+", choices=types, default=list(types))
    add("--variants", nargs="+", help="names of the rows to measure beside the reference")
    add("--seconds", type=float, help="timed seconds of a table; default 30, on a GPU 6")
    add("--limit", type=float, help="seconds after which nothing new begins; default 900, on a GPU 110")
    add("--quick", action="store_true", help="use tiny models, to see whether it runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args(arguments)


def chosen_variants(options: argparse.Namespace) -> list[Variant]:
    """Returns the rows of the tables of steps."""
    rows = step_variants() if "step" in options.only else step_variants()[:1]
    if options.quick:
        rows = [row for row in rows if "compiled" not in row.name]
    if "checkpoint" in options.only:
        first_of_others = next((n for n, row in enumerate(rows) if row.precision != torch.float32), len(rows))
        rows[first_of_others:first_of_others] = checkpoint_variants()
    precisions = [getattr(torch, name) for name in options.precisions]
    first, *others = rows
    known = {row.name for row in rows}
    wanted = known if options.variants is None else set(options.variants)
    if wanted - known:
        raise InputError(
            f"--variants: unknown {', '.join(sorted(wanted - known))}; give some of {', '.join(sorted(known))}"
        )
    return [first, *(row for row in others if row.precision in precisions and row.name in wanted)]


def run_sections(
    options: argparse.Namespace, device: torch.device, clock: Clock
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measures the sections of the command line; yields each table with the name of its section."""
    recipes = options.recipes
    if recipes is None:
        recipes = ["iwslt", "groundhog", "best", *(["multi30k"] if device.type == "cpu" else [])]
    if options.recipes is None and options.quick:
        recipes = ["multi30k"]
    if "output" in options.only:
        yield "output", measure_output(options.quick, device, clock)
    variants = chosen_variants(options)
    for name in recipes if {"step", "checkpoint"} & set(options.only) else []:
        longest = load_recipe(name).data.max_length
        usual = [f"{longest}x{longest}", *([] if device.type == "cuda" else ["20x20"])]
        if options.quick or name == "multi30k":
            usual = ["6x5"] if options.quick else ["text"]
        for lengths in options.lengths or usual:
            if clock.over:
                print(f"step of {name}, {lengths}: {NO_TIME}")
                continue
            case = make_case(name, lengths, options.quick, device)
            yield "step", measure_case(case, variants, device, clock)
            free(device)


@contextmanager
def settings(device: torch.device) -> Iterator[None]:
    """Sets the trainer's settings, but without TF32, to which cuDNN would round the factors of float32 LSTMs."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with reproducible(device, None), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*TF32.*|.*TensorFloat32.*")
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints tables and writes JSON; returns 1 if a variant is wrong, 2 for bad input.

    After Ctrl-C the current measurement ends, the tables hold the results so far, and 130 is returned.
    """
    options = parse(arguments)
    shows = {"step": show_steps, "output": show_output}
    began, interrupts = time.monotonic(), Interrupts()
    try:
        device = resolve_device(options.device)
        gpu = device.type == "cuda"
        limit = (110.0 if gpu else 900.0) if options.limit is None else options.limit
        turns = 0.0 if options.quick else 6.0 if gpu else 30.0
        clock = Clock(limit, turns if options.seconds is None else options.seconds, interrupts)
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        found: dict[str, Any] = {
            "command": " ".join(sys.argv if arguments is None else ["scripts.bench memory", *arguments]),
            "commit": commit or None,
            "machine": describe_machine(str(device)),
            "peak_flops_per_second": {
                name: ceiling(device, getattr(torch, name)) for name in options.precisions
            },
        }
        print(", ".join(f"{key} {value}" for key, value in found["machine"].items()), f"commit {commit}")
        ceilings = (f"{name} {format_rate(rate)}" for name, rate in found["peak_flops_per_second"].items())
        print("a large matrix product:", ", ".join(ceilings))
        with interrupts, settings(device):
            for section, table in run_sections(options, device, clock):
                shows[section](table)
                found.setdefault(section, []).append(table)
                if options.output is not None:
                    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except MismatchError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 1
    except EconmtError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    print(f"memory: {time.monotonic() - began:.0f} s" + (", interrupted" if interrupts.pending else ""))
    return interrupts.exit_code if interrupts.pending else 0


if __name__ == "__main__":
    sys.exit(main())
