"""Tables of a ledger: bytes at the peak by layer and category, and the largest tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from econmt_memory.measure.allocations import OUTSIDE
from econmt_memory.measure.ledger import CATEGORIES, Ledger, Moment, TensorAtPeak
from econmt_memory.report.tables import Cell, ReportTable, format_bytes, format_share, shape_text

LARGEST = 10
"""Number of groups of equal tensors at the peak that are listed."""


def peak_moment(ledger: Ledger) -> Moment:
    """Returns the first moment with the most live bytes."""
    return max(ledger.timeline, key=lambda moment: moment.bytes)


def grouped(largest: Sequence[TensorAtPeak]) -> list[tuple[TensorAtPeak, int]]:
    """Groups equal tensors at a peak; returns each with its number, the group with the most bytes first."""
    return sorted(Counter(largest).items(), key=lambda item: (-item[0].bytes * item[1], item[0]))


def maker(tensor: TensorAtPeak) -> str:
    """Names the operator that made a tensor, the innermost first: "mm in lstm_layer_backward"."""
    if tensor.operator == OUTSIDE:
        return OUTSIDE
    names = [name.rpartition(".")[2] for name in tensor.operator.split()]
    return " in ".join(reversed(names)) or "code before the step"


def ledger_table(ledger: Ledger, kind: str = "layer") -> ReportTable:
    """Lists the bytes at the peak by layer, or by what ``kind`` names, and by category."""
    sizes, total = ledger.by_layer(), ledger.entries.total()
    rows: list[list[Cell]] = [
        [
            layer,
            *(ledger.entries.get((category, layer), 0) for category in CATEGORIES),
            sizes[layer],
            format_share(sizes[layer], total),
        ]
        for layer in ledger.layers
    ]
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
    rows: list[list[Cell]] = [
        [
            number * tensor.bytes,
            f"{number} of {format_bytes(tensor.bytes)}" if number > 1 else "1",
            shape_text(tensor.shape),
            tensor.dtype,
            tensor.category,
            tensor.layer,
            maker(tensor),
        ]
        for tensor, number in groups
    ]
    return ReportTable(
        f"the {count} largest tensors at the peak, equal ones in one row",
        ("size", "tensors", "shape", "dtype", "category", "layer", "made by"),
        rows,
        left=range(2, 7),
    )
