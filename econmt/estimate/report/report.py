"""Result of ``econmt profile``, its tables, and their output on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from econmt.estimate.fit import Fit
from econmt.estimate.kernels import KernelTimes
from econmt.estimate.profiling import Profile
from econmt.estimate.report.kernel_tables import classes_table, launches_table
from econmt.estimate.techniques import Technique
from econmt.tasks.protocol import Shape
from econmt_memory.measure.ledger import CATEGORIES, LAYERS, Ledger
from econmt_memory.measure.storages import PHASES
from econmt_memory.report.ledger_tables import largest_table, ledger_table, peak_moment
from econmt_memory.report.tables import Cell, ReportTable, format_bytes, format_share, print_table

_LEAST_MILLISECONDS = 0.05
"""Shortest time for which a layer that keeps nothing is listed."""


@dataclass
class Report:
    """Result of ``econmt profile``.

    Attributes:
        recipe: Name of the recipe.
        command: Command line that made the report.
        vocabulary: Sizes of the vocabularies, source before target.
        device: "cpu", "cuda" or "cuda:N".
        how: Origin of the figures, a sentence.
        notes: Further sentences for the reader.
        machine: Versions and hardware, see :func:`econmt.engine.machine.describe_machine`.
        profiles: Profiles of the techniques; the reference first if there are several.
        kernels: Kernels of a step on a GPU, those of the reference first.
        ranks: Ledgers of the ranks that differ, if there are several ranks.
        trace: File of the trace that was written; None: none.
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
    trace: Path | None = None


def format_rate(operations: float) -> str:
    """Formats floating-point operations per second: 163.2 GFLOP/s."""
    for unit in ("", "k", "M", "G"):
        if abs(operations) < 1000:
            return f"{operations:.1f} {unit}FLOP/s"
        operations /= 1000
    return f"{operations:.1f} TFLOP/s"


def less(before: float, after: float) -> str:
    """Describes how a number of bytes has changed: 1.33x less."""
    before, after = max(before, 1), max(after, 1)
    if round(before / after, 2) == 1.0:
        return "the same"
    return f"{faster(after, before)} less" if after < before else f"{faster(before, after)} more"


def faster(before: float, after: float) -> str:
    """Formats the ratio of a speed to an earlier one: 1.33x."""
    ratio = after / before
    return f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


def size_of(report: Report) -> str:
    """Describes rows and positions of the batch."""
    rows, source, target = report.shape
    if len(report.vocabulary) > 1:
        return f"{rows:,} sentence pairs, {source} source x {target} target positions"
    return f"{rows:,} rows of {target} tokens"


def heading(report: Report) -> list[str]:
    """Returns the lines above the tables: the workload, and notes for reading the figures."""
    vocabulary = " and ".join(f"{size:,}" for size in report.vocabulary)
    device = report.machine.get("GPU", report.device)
    text = f"{report.recipe}: {size_of(report)}, vocabulary {vocabulary}, {device}"
    if len(report.profiles) == 1:
        text += f", {report.profiles[0].technique.precision.name}"
    return [text, *report.notes, report.how]


def speed_text(times: Ledger) -> str:
    """Describes the speed of a timed step."""
    text = f"{times.tokens / times.seconds:,.0f} target tokens/s, {format_rate(times.flops / times.seconds)}"
    if times.share_of_peak is not None:
        text += f", {100 * times.share_of_peak:.0f} % of what a large matrix product reaches here"
    return text


def summary(profile: Profile) -> list[str]:
    """Describes peak and speed in a few lines."""
    ledger, times = profile.bytes, profile.times
    lines = [
        f"peak {format_bytes(ledger.peak)}, in the {peak_moment(ledger).phase} phase; stash "
        f"{format_bytes(ledger.stashed)}; {'measured' if profile.measured else 'estimated'}"
    ]
    if ledger.allocated is not None and ledger.reserved is not None:
        lines.append(
            f"CUDA's allocator: {format_bytes(ledger.allocated)} allocated, {format_bytes(ledger.reserved)} reserved"
        )
    if ledger.graphs is not None:
        lines.append(f"CUDA graph: {format_bytes(ledger.graphs)} outside of the allocator")
    if ledger.outside is not None:
        how = "measured" if profile.measured else "assumed"
        parts = zip(("context", "libraries", "kernels and CUDA graphs"), ledger.outside, strict=True)
        text = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
        lines.append(f"outside PyTorch's allocator: {format_bytes(ledger.outside.total)} ({how}: {text})")
    if times is not None and times.seconds:
        text = f"{1000 * times.seconds:,.0f} ms a step, {speed_text(times)}"
        lines.append(text + (f" ({profile.timed_shape})" if profile.timed_shape != profile.shape else ""))
    return lines


def ranks_table(ledgers: Sequence[Ledger]) -> ReportTable:
    """Lists the bytes of each rank at its peak by category."""
    rows: list[list[Cell]] = [
        [ledger.rank.split()[1], *map(ledger.category, CATEGORIES), ledger.peak] for ledger in ledgers
    ]
    return ReportTable("what each rank holds at its peak", ("rank", *CATEGORIES, "all"), rows, left=())


def layers_table(profile: Profile) -> ReportTable:
    """Lists the bytes that each layer keeps for the backward pass, and its milliseconds by phase if timed."""
    ledger, times = profile.bytes, profile.times
    title = "stash and time by layer"
    if times is not None and profile.timed_shape != profile.shape:
        title += f" (time of {profile.timed_shape})"
    milliseconds = {} if times is None else times.milliseconds
    phases = PHASES if milliseconds else ()
    rows: list[list[Cell]] = []
    for layer in LAYERS:
        stash = ledger.stash.get(layer, 0)
        spent = [milliseconds.get((phase, layer), 0.0) for phase in phases]
        if stash or any(value >= _LEAST_MILLISECONDS for value in spent):
            rows.append(
                [layer, stash, format_share(stash, ledger.stashed), *(f"{value:,.1f}" for value in spent)]
            )
    sums = [] if times is None else [f"{times.phase(phase):,.1f}" for phase in phases]
    columns = ("layer", "stash", "share", *(f"{phase} ms" for phase in phases))
    return ReportTable(title, columns, rows, ["all", ledger.stashed, "100 %", *sums])


def reference_of(profile: Profile, profiles: Sequence[Profile]) -> Profile | None:
    """Returns the profile that another one is compared with; None for a reference, or if it is missing."""
    reference = profile.technique.compared_with(each.technique for each in profiles)
    if reference is None or reference == profile.technique:
        return None
    return next(each for each in profiles if each.technique == reference)


def faster_text(before: Profile, after: Profile) -> str:
    """Formats the ratio of two speeds; empty if one is unknown."""
    speeds = before.tokens_per_second, after.tokens_per_second
    return "" if speeds[0] is None or speeds[1] is None else faster(speeds[0], speeds[1])


def row_text(profile: Profile) -> str:
    """Describes a technique's stash, peak and speed in a line."""
    ledger, speed = profile.bytes, profile.tokens_per_second
    text = f"{profile.technique.name}: stash {format_bytes(ledger.stashed)}, peak {format_bytes(ledger.peak)}"
    return text if speed is None else f"{text}, {speed:,.0f} target tokens/s"


def comparison_table(profiles: Sequence[Profile]) -> ReportTable:
    """Compares stash, peak and speed of techniques with the reference's in their precision, one row per technique."""
    timed = any(profile.tokens_per_second is not None for profile in profiles)
    rows: list[list[Cell]] = []
    for profile in profiles:
        ledger, speed = profile.bytes, profile.tokens_per_second
        changes, reference = ["", "", ""], reference_of(profile, profiles)
        if reference is not None:
            changes = [
                less(reference.bytes.stashed, ledger.stashed),
                less(reference.bytes.peak, ledger.peak),
                faster_text(reference, profile),
            ]
        row: list[Cell] = [profile.technique.name, ledger.stashed, changes[0], ledger.peak, changes[1]]
        row += ["" if speed is None else f"{speed:,.0f}", changes[2]] if timed else []
        rows.append([*row, "measured" if profile.measured else "estimated"])
    columns = (
        "technique",
        "stash",
        "change",
        "peak",
        "change",
        *(("target tokens/s", "change") if timed else ()),
    )
    return ReportTable("techniques, each against the reference in its precision", (*columns, "bytes"), rows)


def stash_table(profiles: Sequence[Profile]) -> ReportTable:
    """Lists the bytes that each layer keeps for the backward pass, one row per technique."""
    layers = [layer for layer in LAYERS if any(profile.bytes.stash.get(layer) for profile in profiles)]
    rows: list[list[Cell]] = [
        [profile.technique.name, *(profile.bytes.stash.get(layer, 0) for layer in layers)]
        for profile in profiles
    ]
    return ReportTable("kept for the backward pass, by layer", ("technique", *layers), rows)


def fit_table(fits: Mapping[Technique, Sequence[Fit]], budget: int) -> ReportTable:
    """Lists the largest batch of each bucket; of several techniques only the rows, compared with the references'."""
    several = len(fits) > 1
    references = {technique: technique.compared_with(fits) for technique in fits}
    columns = [] if several else ["rows", "target tokens", "bytes"]
    for technique, reference in references.items() if several else ():
        columns += [technique.name] if reference in (None, technique) else [technique.name, "change"]
    rows = []
    for fitting in zip(*fits.values(), strict=True):
        of_technique = dict(zip(fits, fitting, strict=True))
        cells = [str(fitting[0].source), str(fitting[0].target)]
        for technique, each in of_technique.items():
            cells.append(f"{each.rows:,}" if each.rows else "none")
            reference = references[technique]
            if reference is not None and reference != technique:
                before = of_technique[reference].rows
                cells.append(faster(before, each.rows) if before and each.rows else "")
            if not several:
                size = format_bytes(each.bytes)
                cells += [f"{each.rows * each.target:,}", size] if each.rows else ["", f"1 row takes {size}"]
        rows.append(cells)
    title = f"largest batch in {format_bytes(budget)} ({budget:,} bytes)"
    return ReportTable(title, ("source", "target", *columns), rows, left=())


def print_report(report: Report, console: Console) -> None:
    """Prints everything but the timeline."""
    tables = [launches_table(report.kernels)] if report.kernels else []
    tables += [*(classes_table([times]) for times in report.kernels)]
    tables += [ranks_table(report.ranks)] if report.ranks else []
    lines: list[str] = []
    if len(report.profiles) > 1:
        tables += [comparison_table(report.profiles), stash_table(report.profiles)]
    else:
        (profile,) = report.profiles
        tables += [ledger_table(profile.bytes), layers_table(profile), largest_table(profile.bytes)]
        lines += summary(profile)
    for line in heading(report):
        console.print(line, highlight=False, markup=False)
    for table in tables:
        print_table(console, table.for_terminal())
    for line in lines:
        console.print(line, highlight=False, markup=False)
