"""Measures memory and time of steps that recompute.

    python -m scripts.bench memory --device cuda --csv memory.csv
    python -m scripts.bench memory --only step --recipe iwslt --lengths 100x80

The steps of a recipe are measured with each implementation and stash, with torch.utils.checkpoint, and the output layer
alone. Loss and gradient norm of each variant are compared with the reference's before it is timed. The learning rate
is 0, so that all variants see the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.bench.rows import Row, Say
from econmt.checkpoint.tensor_files import dtype_name
from econmt.config.recipe import load_recipe
from econmt.engine.devices import reproducible
from econmt.errors import EconmtError
from econmt_ops import linear_cross_entropy
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.dispatch.timing import Timing, ratio
from scripts.bench.frame import Bench, in_turns
from scripts.bench.layers import peak_bytes
from scripts.bench.memory_steps import (
    QUICK,
    Case,
    Steps,
    Variant,
    checkpoint_variants,
    make_case,
    step_variants,
)

SECTIONS = ("step", "checkpoint", "output")
"""Parts: steps of econmt's operations, with torch.utils.checkpoint, and the output layer alone."""
TIMED_POSITIONS = 3000
"""Most target positions of a batch that is timed on the CPU: larger ones take many seconds a step.

Compiled variants, which keep the same tensors as the others, are left out with larger batches."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative difference of loss and gradient norm from the reference in float32."""
OUTPUT_LAYER, QUICK_OUTPUT_LAYER = (6400, 512, 32_000), (40, 8, 50)
"""Rows, inputs and words of the output layer."""


def check(name: str, values: Sequence[float], expected: Sequence[float], tolerance: float) -> None:
    """Raises EconmtError if loss or gradient norm differ from the reference's by more than the tolerance."""
    for what, value, other in zip(("loss", "gradient norm"), values, expected, strict=True):
        if not abs(value - other) <= tolerance * abs(other):
            raise EconmtError(f"bench memory: {name}: {what} {value:.9g}, but the reference has {other:.9g}")


def add_times(row: Row, timing: Timing, first: Timing) -> None:
    """Adds a timing to a row, and the speed relative to the first variant's."""
    row["milliseconds"] = 1e3 * timing.median
    row |= {"lowest decile": 1e3 * timing.low, "highest decile": 1e3 * timing.high}
    row["speed"] = ratio(first.samples, timing.samples)


def rows_of_steps(case: Case, variants: Sequence[Variant], seconds: float, say: Say) -> Iterator[Row]:
    """Yields the row of each variant; those that are timed come at the end, since they take turns."""
    steps = Steps(case)
    cpu = steps.device.type == "cpu"
    timed = not cpu or steps.batch.target_output.numel() <= TIMED_POSITIONS
    expected = steps.values(variants[0])
    rows: list[Row] = []
    for variant in variants:
        if not timed and "compiled" in variant.name:
            continue
        dtype = dtype_name(variant.precision)
        say(f"{case.name}, {case.lengths}: {variant.name}, {dtype}")
        row: Row = {"case": f"step of {case.name}, {case.lengths}"}
        row |= {"variant": variant.name, "dtype": dtype}
        rows.append(row)
        try:
            check(variant.name, steps.values(variant), expected, TOLERANCE[variant.precision])
            row |= steps.memory_of(variant)
            for what in ("stash", "peak"):
                row[f"{what}, times less"] = float(rows[0][f"{what} bytes"]) / float(row[f"{what} bytes"])
        except torch.OutOfMemoryError:
            row["failure"] = "out of memory"
        steps.forget()
        if not timed:
            yield row
    if not timed:
        return
    say(f"{case.name}, {case.lengths}: timing in turns")
    turns = {
        number: partial(steps.run, variant)
        for number, variant in enumerate(variants)
        if "failure" not in rows[number]
    }
    timings = in_turns(turns, steps.device, seconds=seconds)
    for number, timing in timings.items():
        add_times(rows[number], timing, timings[0])
        rows[number]["target tokens/s"] = steps.batch.target_tokens / timing.median
    yield from rows


def rows_of_output(
    shape: tuple[int, int, int], compiled: bool, device: torch.device, seconds: float
) -> Iterator[Row]:
    """Yields a row for each implementation of the output layer and its loss, torch's first."""
    count, width, vocabulary = shape
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(count, width, generator=generator).to(device).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to(device).requires_grad_()
    targets = torch.randint(vocabulary, (count,), generator=generator).to(device)
    losses: dict[str, Callable[[], Tensor]] = {
        "cross_entropy(linear)": lambda: functional.cross_entropy(functional.linear(hidden, weight), targets)
    }
    if hasattr(nn, "LinearCrossEntropyOptions"):  # since torch 2.13
        losses["linear_cross_entropy of torch"] = lambda: functional.linear_cross_entropy(
            hidden, weight, targets, options=nn.LinearCrossEntropyOptions()
        )
    for name in ("recompute", "compiled") if compiled else ("recompute",):
        losses[name] = partial(linear_cross_entropy, hidden, weight, targets, implementation=name)

    def run(name: str) -> tuple[Tensor, ...]:
        loss = losses[name]()
        gradients = torch.autograd.grad(loss, (hidden, weight))
        return loss.detach(), *(gradient.detach() for gradient in gradients)

    expected: Sequence[float] = ()
    rows: list[Row] = []
    for name in losses:
        loss, *gradients = run(name)
        values = float(loss), float(torch.cat([each.flatten() for each in gradients]).norm())
        del gradients
        expected = expected or values
        check(name, values, expected, TOLERANCE[torch.float32])
        row: Row = {"case": f"output layer, {' x '.join(f'{size:,}' for size in shape)}"}
        peak = peak_bytes(partial(run, name), device) - hidden.nbytes - weight.nbytes
        row |= {"variant": name, "dtype": "float32", "peak bytes": peak}
        row["peak, times less"] = float(rows[0]["peak bytes"]) / peak if rows else 1.0
        rows.append(row)
    timings = in_turns({name: partial(run, name) for name in losses}, device, seconds=seconds)
    for row, timing in zip(rows, timings.values(), strict=True):
        add_times(row, timing, timings["cross_entropy(linear)"])
        yield row


def chosen_variants(only: Sequence[str], compiled: bool) -> list[Variant]:
    """Returns the variants of steps to measure, the reference first; those of torch.utils.checkpoint are in float32."""
    variants = [each for each in step_variants() if compiled or "compiled" not in each.name]
    chosen = variants[: None if "step" in only else 1]
    return chosen + checkpoint_variants() if "checkpoint" in only else chosen


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="auto", seconds=30.0)
    add = bench.add_argument
    add("--only", action="append", choices=SECTIONS, help="part to measure; may be repeated (all)")
    add("--recipe", default="iwslt", choices=("iwslt", "multi30k"), help="recipe (%(default)s)")
    text = "source x target positions of full rows, as 100x80; default: the longest, on a CPU also 20x20"
    add("--lengths", action="append", help=text)
    add("--quick", action="store_true", help="use tiny models, to see whether everything runs")
    given = bench.begin(words)
    parts, device = given.only or list(SECTIONS), given.device
    compiled, cpu = has_compiler() and not given.quick, device.type == "cpu"
    chosen = chosen_variants(parts, compiled)

    def rows() -> Iterator[Row]:
        if "output" in parts:
            shape = QUICK_OUTPUT_LAYER if given.quick else OUTPUT_LAYER
            yield from rows_of_output(shape, compiled, device, given.seconds)
        longest = load_recipe(given.recipe).pairs.max_length
        usual = ["6x5"] if given.quick else [f"{longest}x{longest}", *["20x20"] * cpu]
        for text in (given.lengths or usual) if {"step", "checkpoint"} & {*parts} else []:
            case = make_case(given.recipe, text, QUICK if given.quick else [], device)
            yield from rows_of_steps(case, chosen, given.seconds, bench.say)

    bench.print_header()
    # cuDNN would round the factors of float32 LSTMs to TF32.
    with reproducible(device, given.threads), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        bench.report(rows(), "memory and time")
