"""A ledger as tables and as JSON values: bytes at the peak by layer and category, and the largest tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from econmt_memory.measure.allocations import OUTSIDE
from econmt_memory.measure.ledger import CATEGORIES, Ledger, Moment, TensorAtPeak
from econmt_memory.report.tables import Cell, ReportTable, format_bytes, format_share, shape_text

LARGEST = 10
"""Number of groups of equal tensors at the peak that are listed."""

POINTS = 1000
"""Number of points of a downsampled timeline, approximately."""


def peak_moment(ledger: Ledger) -> Moment:
    """Returns the first moment with the most live bytes."""
    return max(ledger.timeline, key=lambda moment: moment.bytes)


def grouped(largest: Sequence[TensorAtPeak]) -> list[tuple[TensorAtPeak, int]]:
    """Groups equal tensors at a peak; returns each with its number, the group with the most bytes first."""
    return sorted(Counter(largest).items(), key=lambda item: (-item[0].bytes * item[1], item[0]))


def maker(tensor: TensorAtPeak) -> str:
    """Names the operator that made a tensor, the innermost first, "mm in lstm_layer_backward", and the line."""
    if tensor.operator == OUTSIDE:
        return OUTSIDE
    names = [name.rpartition(".")[2] for name in tensor.operator.split()]
    line = f", {tensor.line}" if tensor.line else ""
    return f"{' in '.join(reversed(names)) or 'code before the step'}{line}"


def ledger_table(ledger: Ledger, kind: str = "layer") -> ReportTable:
    """Lists the bytes at the peak by layer, or by what ``kind`` names, and by category."""
    sizes, total = ledger.by_layer(), ledger.entries.total()
    rows: list[list[Cell]] = []
    for layer in ledger.layers:
        amounts = (ledger.entries.get((category, layer), 0) for category in CATEGORIES)
        rows.append([layer, *amounts, sizes[layer], format_share(sizes[layer], total)])
    tokens = f"{ledger.tokens} target tokens" if ledger.tokens else ""
    whose = ", ".join(filter(None, [tokens, ledger.rank]))
    return ReportTable(
        "where the bytes of a training step went" + (f" ({whose})" if whose else ""),
        (kind, *CATEGORIES, "all", "share"),
        rows,
        ["all", *map(ledger.category, CATEGORIES), total, "100 %"],
        below=_device_rows(ledger),
    )


def _device_rows(ledger: Ledger) -> list[list[Cell]]:
    """Returns the rows of a ledger's table about the rest of a GPU's memory."""
    if ledger.outside is None or ledger.reserved is None:
        return []
    sizes = {
        "reserved, idle": ledger.reserved - ledger.entries.total(),
        "outside torch": ledger.outside.total,
        "of the GPU": ledger.reserved + ledger.outside.total,
    }
    return [[name, *[""] * len(CATEGORIES), size, ""] for name, size in sizes.items()]


def largest_table(ledger: Ledger) -> ReportTable:
    """Lists the largest tensors alive at the peak; equal ones share a row."""
    groups = grouped(ledger.largest)[:LARGEST]
    count = sum(number for _, number in groups)
    rows: list[list[Cell]] = []
    for tensor, number in groups:
        tensors = f"{number} of {format_bytes(tensor.bytes)}" if number > 1 else "1"
        what = shape_text(tensor.shape), tensor.dtype, tensor.category, tensor.layer, maker(tensor)
        rows.append([number * tensor.bytes, tensors, *what])
    return ReportTable(
        f"the {count} largest tensors at the peak, equal ones in one row",
        ("size", "tensors", "shape", "dtype", "category", "layer", "made by"),
        rows,
        left=range(2, 7),
    )


def downsample(timeline: Sequence[Moment], points: int = POINTS) -> list[Moment]:
    """Reduces a timeline to fewer points with the same outline.

    Of the moments that share a column of the chart, the highest and the last one remain, and each phase's first one.
    """
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
        indices = sorted({highest, len(together) - 1} | ({0} if begins else set()))
        kept += [together[index] for index in indices]
    return kept


def ledger_data(ledger: Ledger) -> dict[str, Any]:
    """Returns a ledger as JSON values."""
    return {
        "rank": ledger.rank or None,
        "peak_bytes": ledger.peak,
        "peak_phase": peak_moment(ledger).phase if ledger.timeline else None,
        "entries": [
            {"category": category, "layer": layer, "bytes": size}
            for category in CATEGORIES
            for layer in ledger.layers
            if (size := ledger.entries.get((category, layer)))
        ],
        "stash_bytes": ledger.stashed,
        "stash": {layer: ledger.stash[layer] for layer in ledger.ordered(+ledger.stash)},
        "largest": [{**tensor._asdict(), "count": count} for tensor, count in grouped(ledger.largest)],
        "timeline": [list(moment) for moment in downsample(ledger.timeline)],
        "allocated_bytes": ledger.allocated,
        "reserved_bytes": ledger.reserved,
        "graph_bytes": ledger.graphs,
        "outside_bytes": None if ledger.outside is None else ledger.outside._asdict(),
        "target_tokens": ledger.tokens,
        "flops": ledger.flops,
    }
