"""GPU kernels of steps as tables and as JSON values: the reference launched one by one, and the recipe's CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from econmt.estimate.kernels import CLASSES, KernelRow, KernelTimes
from econmt_memory.report.tables import ReportTable, format_share


def launches_table(steps: Sequence[KernelTimes]) -> ReportTable:
    """Compares the time of launching kernels with that of running them, one row per step."""
    columns = (
        *("step", "ms", "kernels", "launches by the host"),
        *("ms of launching", "ms of computing", "ms of gaps"),
    )
    rows = [
        [
            times.name,
            f"{times.step:,.2f}",
            *(f"{count:,}" for count in (times.kernels, times.launches)),
            *(f"{milliseconds:,.2f}" for milliseconds in (times.launching, times.busy, times.gaps)),
        ]
        for times in steps
    ]
    return ReportTable("launches against compute", columns, rows)


def classes_table(steps: Sequence[KernelTimes]) -> ReportTable:
    """Lists launches, time and share of each class of kernels, and of the gaps between kernels, side by side by step.

    The last column is the memory rate of the last step's class as a share of that of copies.
    """
    figures = ("launches", "ms", "share")
    columns = [
        figure if len(steps) == 1 else f"{times.name}: {figure}" for times in steps for figure in figures
    ]
    rows = []
    for kind in CLASSES:
        of_steps = [next((row for row in times.rows if row.kind == kind), None) for times in steps]
        if any(of_steps):
            cells = [kind]
            for row, times in zip(of_steps, steps, strict=True):
                cells += (
                    ["", "", ""] if row is None else _time_cells(f"{row.launches:,}", row.milliseconds, times)
                )
            share = None if of_steps[-1] is None else share_of_copying(of_steps[-1], steps[-1])
            rows.append([*cells, "" if share is None else f"{100 * share:.0f} %"])
    gaps = [cell for times in steps for cell in _time_cells("", times.gaps, times)]
    title = f"kernels by class, {' and '.join(times.name for times in steps)}"
    return ReportTable(title, ["class", *columns, "of the copy rate"], [*rows, ["gaps", *gaps, ""]])


def _time_cells(launches: str, milliseconds: float, times: KernelTimes) -> list[str]:
    return [launches, f"{milliseconds:,.2f}", format_share(milliseconds, times.step)]


def share_of_copying(row: KernelRow, times: KernelTimes) -> float | None:
    """Returns a class's memory rate as a share of that of copies; None if its bytes are unknown."""
    if row.bytes is None or not row.milliseconds:
        return None
    return row.bytes / (row.milliseconds / 1e3) / times.copy_rate


def kernels_data(steps: Sequence[KernelTimes]) -> list[dict[str, Any]]:
    """Returns the kernels as JSON values; times are milliseconds."""
    return [
        {
            "step": times.name,
            "milliseconds": times.step,
            "computing": times.busy,
            "gaps": times.gaps,
            "launches": times.launches,
            "launching": times.launching,
            "copy_bytes_per_second": times.copy_rate,
            "classes": [
                {
                    "class": row.kind,
                    "launches": row.launches,
                    "milliseconds": row.milliseconds,
                    "bytes": row.bytes,
                    "share_of_copy_rate": share_of_copying(row, times),
                }
                for row in times.rows
            ],
        }
        for times in steps
    ]
