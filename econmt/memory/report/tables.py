"""Ledgers as tables for a person, and as plain data for a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from econmt.data.tables import print_table
from econmt.memory.measure.kernels import KernelTimes
from econmt.memory.measure.ledger import CATEGORIES, LAYERS, Ledger, Moment, TensorAtPeak
from econmt.memory.measure.tracker import PHASES
from econmt.memory.plan.fit import Fit
from econmt.memory.profiling import Profile
from econmt.memory.report.kernel_tables import kernel_tables, kernels_data
from econmt.tasks.protocol import Shape

POINTS = 1000
"""Points of a timeline that is written down, or a few more."""

LEAST = 0.05
"""Milliseconds that are worth a row."""


@dataclass
class Report:
    """Result of ``econmt profile``.

    Attributes:
        recipe: the run's name.
        command: that made the report.
        shape: of the batch.
        vocabulary: source and target entries, or those of the only one.
        device: "cpu", "cuda" or "cuda:N".
        how: where the figures come from, in a sentence.
        notes: what else a reader must know, a sentence each.
        machine: names and values, see :func:`econmt.memory.measure.machine.describe_machine`.
        profiles: one a technique, the reference first if there are several.
        kernels: of a step on a GPU, before and after.
        ranks: ledgers of those that differ, the profiles' one among them; none of one rank alone.
    """

    recipe: str
    command: str
    shape: Shape
    vocabulary: tuple[int, ...]
    device: str
    how: str
    notes: list[str]
    machine: dict[str, str]
    profiles: list[Profile] = field(default_factory=list)
    kernels: list[KernelTimes] = field(default_factory=list)
    ranks: list[Ledger] = field(default_factory=list)


# ---------------------------------------------------------------------- numbers as words


def format_bytes(size: float) -> str:
    """A byte count in decimal units, as the tables of the literature print it: 1.2 MB."""
    for unit in ("B", "kB", "MB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def format_rate(operations: float) -> str:
    """Floating point operations a second: 163.2 GFLOP/s."""
    for unit in ("", "k", "M", "G"):
        if abs(operations) < 1000:
            return f"{operations:.1f} {unit}FLOP/s"
        operations /= 1000
    return f"{operations:.1f} TFLOP/s"


def format_precision(profile: Profile) -> str:
    """float32 or bfloat16."""
    return str(profile.technique.precision).removeprefix("torch.")


def less(before: float, after: float) -> str:
    """Describes by how much a byte count has shrunk."""
    before, after = max(before, 1), max(after, 1)
    if round(before / after, 2) == 1.0:
        return "the same"
    return f"{_times(before / after)} less" if after < before else f"{_times(after / before)} more"


def faster(before: float, after: float) -> str:
    """Describes by how much a speed has grown."""
    return _times(after / before)


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


def peak_moment(ledger: Ledger) -> Moment:
    """The moment of the peak; the first of equals."""
    return max(ledger.timeline, key=lambda moment: moment.bytes)


def grouped(largest: Sequence[TensorAtPeak]) -> list[tuple[TensorAtPeak, int]]:
    """The largest storages at a peak, those that differ in nothing together, with how many they are."""
    return sorted(Counter(largest).items(), key=lambda item: (-item[0].bytes * item[1], item[0]))


def maker(tensor: TensorAtPeak) -> str:
    """The operator that made a tensor, the innermost first: "mm in lstm_layer_backward"."""
    names = [name.rpartition(".")[2] for name in tensor.operator.split()]
    return " in ".join(reversed(names)) or "there before the step"


def shape_text(shape: Sequence[int]) -> str:
    """128 x 100 x 512; "one value" for a scalar."""
    return " x ".join(map(str, shape)) or "one value"


# ---------------------------------------------------------------------- tables


def table(ledger: Ledger) -> Table:
    """The ledger as a table: a row a layer, a column a category, sums at the edges, and each layer's share."""
    total = ledger.total or 1
    what = ", ".join(filter(None, [f"{ledger.tokens} target tokens", ledger.rank]))
    result = Table(title=f"where the bytes of a training step went ({what})")
    result.add_column("layer")
    for category in (*CATEGORIES, "all", "%"):
        result.add_column(category, justify="right")
    for layer in LAYERS:
        if not ledger.layer(layer):
            continue
        cells = [format_bytes(ledger.entries.get((category, layer), 0)) for category in CATEGORIES]
        result.add_row(
            layer, *cells, format_bytes(ledger.layer(layer)), f"{100 * ledger.layer(layer) / total:.0f}"
        )
    sums = [format_bytes(ledger.category(category)) for category in CATEGORIES]
    result.add_section()
    result.add_row("all", *sums, format_bytes(ledger.total), "100")
    return result


def ranks_table(ledgers: Sequence[Ledger]) -> Table:
    """A row a rank: what it holds at its peak, by category."""
    result = Table(title="what each rank holds at its peak")
    for column in ("rank", *CATEGORIES, "all"):
        result.add_column(column, justify="right")
    for ledger in ledgers:
        cells = [format_bytes(ledger.category(category)) for category in CATEGORIES]
        result.add_row(ledger.rank.split()[1], *cells, format_bytes(ledger.peak))
    return result


def layers_table(profile: Profile) -> Table:
    """A row a layer: what it keeps from the forward to the backward pass, and its milliseconds in both."""
    ledger, times = profile.bytes, profile.times
    title = "stash and time by layer"
    if times is not None and profile.timed_shape != profile.shape:
        title += f" (time of {profile.timed_shape})"
    result = Table(title=title)
    result.add_column("layer")
    milliseconds = {} if times is None else times.milliseconds
    phases = PHASES if milliseconds else ()
    for column in ("stash", "share", *(f"{phase} ms" for phase in phases)):
        result.add_column(column, justify="right")
    for layer in LAYERS:
        stash = ledger.stash.get(layer, 0)
        spent = [milliseconds.get((phase, layer), 0.0) for phase in phases]
        if stash or any(value >= LEAST for value in spent):
            share = f"{100 * stash / (ledger.stashed or 1):.0f} %"
            result.add_row(layer, format_bytes(stash), share, *(f"{value:,.1f}" for value in spent))
    result.add_section()
    sums = [] if times is None else [f"{times.phase(phase):,.1f}" for phase in phases]
    result.add_row("all", format_bytes(ledger.stashed), "100 %", *sums)
    return result


def process_sentence(ledger: Ledger) -> str:
    """The three figures that are called memory, in one sentence."""
    return (
        f"The ledger's peak, {format_bytes(ledger.peak)}, counts tensors of one step. The process has "
        f"{format_bytes(sum(ledger.process.values()))} resident after it; its peak so far was "
        f"{format_bytes(ledger.process_peak)}, which a run logs as process peak."
    )


def process_table(ledger: Ledger) -> Table:
    """Returns the table of the process's resident memory by origin."""
    whole = sum(ledger.process.values())
    result = Table(title="where the memory of the process is, after the step")
    result.add_column("part")
    for column in ("bytes", "share"):
        result.add_column(column, justify="right")
    for part, size in sorted(ledger.process.items(), key=lambda item: -item[1]):
        result.add_row(part, format_bytes(size), f"{100 * size / (whole or 1):.0f} %")
    result.add_section()
    result.add_row("resident set of the process", format_bytes(whole), "100 %")
    return result


def largest_table(ledger: Ledger, count: int = 8) -> Table:
    """The largest tensors alive at the peak."""
    result = Table(title=f"the {len(ledger.largest)} largest tensors at the peak")
    for column in ("bytes", "tensors"):
        result.add_column(column, justify="right")
    for column in ("shape", "dtype", "category", "layer", "made by"):
        result.add_column(column)
    for tensor, number in grouped(ledger.largest)[:count]:
        each = f"{number} of {format_bytes(tensor.bytes)}" if number > 1 else "1"
        result.add_row(
            format_bytes(number * tensor.bytes),
            each,
            shape_text(tensor.shape),
            tensor.dtype,
            tensor.category,
            tensor.layer,
            maker(tensor),
        )
    return result


def summary(profile: Profile) -> list[str]:
    """Peak and speed in a few lines."""
    ledger, times = profile.bytes, profile.times
    moment = peak_moment(ledger)
    lines = [
        f"peak {format_bytes(ledger.peak)}, in the {moment.phase} phase; stash {format_bytes(ledger.stashed)}; "
        + ("measured" if profile.measured else "estimated")
    ]
    if ledger.allocated is not None and ledger.reserved is not None:
        lines.append(
            f"CUDA's allocator: {format_bytes(ledger.allocated)} allocated, {format_bytes(ledger.reserved)} reserved"
        )
    if ledger.graphs is not None:
        lines.append(f"CUDA graph: {format_bytes(ledger.graphs)} outside of the allocator")
    if times is not None and times.seconds:
        assert times.tokens_per_second is not None
        assert times.flops_per_second is not None
        text = (
            f"{1000 * times.seconds:,.0f} ms a step, {times.tokens_per_second:,.0f} target tokens/s, "
            f"{format_rate(times.flops_per_second)}"
        )
        if times.share_of_peak is not None:
            text += f", {100 * times.share_of_peak:.0f} % of what a large matrix product reaches here"
        lines.append(text + (f" ({profile.timed_shape})" if profile.timed_shape != profile.shape else ""))
    return lines


def comparison_table(profiles: Sequence[Profile]) -> Table:
    """A row a technique: stash, peak and speed, each with its change against the first row."""
    first = profiles[0]
    timed = any(profile.tokens_per_second is not None for profile in profiles)
    result = Table(title="techniques, each against the reference")
    result.add_column("technique")
    for column in ("stash", "change", "peak", "change", *(("target tokens/s", "change") if timed else ())):
        result.add_column(column, justify="right")
    for profile in profiles:
        ledger = profile.bytes
        cells = [
            format_bytes(ledger.stashed),
            less(first.bytes.stashed, ledger.stashed),
            format_bytes(ledger.peak),
            less(first.bytes.peak, ledger.peak),
        ]
        if timed:
            before, now = first.tokens_per_second, profile.tokens_per_second
            cells.append("" if now is None else f"{now:,.0f}")
            cells.append("" if now is None or before is None else faster(before, now))
        if profile is first:
            cells[1::2] = [""] * len(cells[1::2])
        result.add_row(profile.technique.name, *cells)
    return result


def stash_table(profiles: Sequence[Profile]) -> Table:
    """A row a technique: bytes that each layer keeps for the backward pass, and its share of them."""
    layers = [layer for layer in LAYERS if any(profile.bytes.stash.get(layer) for profile in profiles)]
    result = Table(title="kept for the backward pass, by layer")
    result.add_column("technique")
    for layer in layers:
        result.add_column(layer, justify="right")
    for profile in profiles:
        stash, all_of_it = profile.bytes.stash, profile.bytes.stashed or 1
        result.add_row(
            profile.technique.name,
            *(
                f"{format_bytes(stash.get(layer, 0))}  {100 * stash.get(layer, 0) / all_of_it:3.0f} %"
                for layer in layers
            ),
        )
    return result


def fit_table(fits: Mapping[str, Sequence[Fit]], budget: int) -> Table:
    """The largest batch of each bucket; of several techniques only its rows, and how many times the first one's."""
    result = Table(title=f"largest batch in {format_bytes(budget)} ({budget:,} bytes)")
    names = list(fits)
    heads = ["rows", "target tokens", "bytes"]
    if len(names) > 1:
        heads = [names[0], *(head for name in names[1:] for head in (name, "change"))]
    for head in ("source", "target", *heads):
        result.add_column(head, justify="right")
    for first, *others in zip(*fits.values(), strict=True):
        cells = [str(first.source), str(first.target), f"{first.rows:,}" if first.rows else "none"]
        if len(names) == 1:
            size = format_bytes(first.bytes)
            cells += [f"{first.rows * first.target:,}", size] if first.rows else ["", f"1 row takes {size}"]
        for other in others:
            cells.append(f"{other.rows:,}" if other.rows else "none")
            cells.append(faster(first.rows, other.rows) if first.rows and other.rows else "")
        result.add_row(*cells)
    return result


def print_report(report: Report, console: Console) -> None:
    """Print everything but the timeline."""
    for line in heading(report):
        console.print(line, highlight=False, markup=False)
    for each in kernel_tables(report.kernels) if report.kernels else ():
        print_table(console, each)
    if report.ranks:
        print_table(console, ranks_table(report.ranks))
    if len(report.profiles) > 1:
        print_table(console, comparison_table(report.profiles))
        print_table(console, stash_table(report.profiles))
        return
    (profile,) = report.profiles
    print_table(console, table(profile.bytes))
    print_table(console, layers_table(profile))
    print_table(console, largest_table(profile.bytes))
    of_process = profile.bytes if profile.times is None else profile.times
    if of_process.process:
        print_table(console, process_table(of_process))
        console.print(process_sentence(of_process), highlight=False, markup=False)
    for line in summary(profile):
        console.print(line, highlight=False, markup=False)


def size_of(report: Report) -> str:
    """The rows and positions of the batch; a language model has one vocabulary, and no source."""
    rows, source, target = report.shape
    if len(report.vocabulary) > 1:
        return f"{rows:,} sentence pairs, {source} source x {target} target positions"
    return f"{rows:,} rows of {target} tokens"


def heading(report: Report) -> list[str]:
    """Returns the lines above the tables: the workload, and notes for reading the figures."""
    where = report.machine.get("GPU", report.device)
    shape = size_of(report)
    if len(report.vocabulary) > 1:
        shape = f"{report.shape} (sentence pairs x source x target positions)"
    vocabulary = " and ".join(f"{size:,}" for size in report.vocabulary)
    text = f"{report.recipe}: {shape}, vocabulary {vocabulary}, {where}"
    if len(report.profiles) == 1:
        text += f", {format_precision(report.profiles[0])}"
    return [text, *report.notes, report.how]


# ---------------------------------------------------------------------- plain data


def thin(timeline: Sequence[Moment], points: int = POINTS) -> list[Moment]:
    """A timeline with fewer points that looks the same: where many fall together, the highest and the last stay."""
    if len(timeline) <= points:
        return list(timeline)
    span = timeline[-1].milliseconds or 1.0
    columns = max(1, points // 2)
    kept: list[Moment] = []
    for (phase, _), group in groupby(
        timeline, lambda moment: (moment.phase, int(columns * moment.milliseconds / span))
    ):
        together = list(group)
        highest = max(range(len(together)), key=lambda index: together[index].bytes)
        begins = not kept or kept[-1].phase != phase
        places = sorted({highest, len(together) - 1} | ({0} if begins else set()))
        kept += [together[place] for place in places]
    return kept


def ledger_data(ledger: Ledger) -> dict[str, Any]:
    """A ledger as JSON values; bytes are bytes, times milliseconds or seconds."""
    return {
        "rank": ledger.rank or None,
        "peak_bytes": ledger.peak,
        "peak_phase": peak_moment(ledger).phase if ledger.timeline else None,
        "entries": [
            {"category": category, "layer": layer, "bytes": size}
            for (category, layer), size in _ordered(ledger.entries)
        ],
        "stash_bytes": ledger.stashed,
        "stash": {layer: ledger.stash[layer] for layer in LAYERS if ledger.stash.get(layer)},
        "largest": [{**tensor._asdict(), "count": count} for tensor, count in grouped(ledger.largest)],
        "timeline": [list(moment) for moment in thin(ledger.timeline)],
        "allocated_bytes": ledger.allocated,
        "reserved_bytes": ledger.reserved,
        "graph_bytes": ledger.graphs,
        "target_tokens": ledger.tokens,
        "flops": ledger.flops,
    }


def times_data(ledger: Ledger, shape: Shape) -> dict[str, Any]:
    """The times of a ledger as JSON values."""
    phases = dict.fromkeys(phase for phase, _ in ledger.milliseconds)
    return {
        "shape": shape._asdict(),
        "seconds": ledger.seconds,
        "process_bytes": ledger.process,
        "process_peak_bytes": ledger.process_peak,
        "milliseconds": {
            phase: {layer: value for (name, layer), value in ledger.milliseconds.items() if name == phase}
            for phase in phases
        },
        "target_tokens": ledger.tokens,
        "target_tokens_per_second": ledger.tokens_per_second,
        "flops": ledger.flops,
        "flops_per_second": ledger.flops_per_second,
        "peak_flops_per_second": ledger.peak_flops_per_second,
        "share_of_peak": ledger.share_of_peak,
    }


def _ordered(entries: Mapping[tuple[str, str], int]) -> Iterator[tuple[tuple[str, str], int]]:
    for category in CATEGORIES:
        for layer in LAYERS:
            if entries.get((category, layer)):
                yield (category, layer), entries[category, layer]


def profile_data(profile: Profile) -> dict[str, Any]:
    """One technique as JSON values."""
    timed = profile.times is not None and profile.timed_shape is not None
    return {
        "technique": profile.technique.name,
        "ops": profile.technique.implementations._asdict(),
        "precision": format_precision(profile),
        "bytes": "measured" if profile.measured else "estimated",
        "ledger": ledger_data(profile.bytes),
        "times": times_data(profile.times, profile.timed_shape) if timed else None,  # type: ignore[arg-type]
    }


def report_data(report: Report) -> dict[str, Any]:
    """The whole report as JSON values."""
    return {
        "recipe": report.recipe,
        "command": report.command,
        "shape": report.shape._asdict(),
        "vocabulary": dict(
            zip(
                ("source", "target", *(f"factor{number}" for number in range(1, len(report.vocabulary) - 1)))
                if len(report.vocabulary) > 1
                else ("text",),
                report.vocabulary,
                strict=True,
            )
        ),
        "device": report.device,
        "machine": report.machine,
        "how": report.how,
        "notes": report.notes,
        "ranks": [ledger_data(ledger) for ledger in report.ranks],
        "profiles": [profile_data(profile) for profile in report.profiles],
        "kernels": kernels_data(report.kernels),
    }


def fit_data(fits: Mapping[str, Sequence[Fit]], budget: int) -> dict[str, Any]:
    """Largest batches as JSON values."""
    return {
        "budget_bytes": budget,
        "techniques": {name: [found._asdict() for found in row] for name, row in fits.items()},
    }
