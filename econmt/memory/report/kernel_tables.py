"""The kernels of steps on a GPU, as tables and as plain data: before, launched one by one, and after, in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from econmt.memory.measure.kernels import CLASSES, KernelRow, KernelTimes

LAUNCHES = (
    "step",
    "ms",
    "kernels",
    "launches by the host",
    "ms of launching",
    "ms of computing",
    "ms of gaps",
)
"""Columns of the table that sets launching against computing."""


def launch_cells(times: KernelTimes) -> list[str]:
    """A step's row of launching against computing."""
    figures = (times.launching, times.busy, times.gaps)
    counts = (times.kernels, times.launches)
    return [
        times.name,
        f"{times.step:,.2f}",
        *(f"{count:,}" for count in counts),
        *(f"{each:,.2f}" for each in figures),
    ]


def share_of_copying(row: KernelRow, times: KernelTimes) -> float | None:
    """Returns a class's memory rate as a share of that of copies, or None if its bytes are unknown."""
    if row.bytes is None or not row.milliseconds:
        return None
    return row.bytes / (row.milliseconds / 1e3) / times.copy_rate


def class_columns(steps: Sequence[KernelTimes]) -> list[str]:
    """Columns of the table of classes: three for each step, and the share of the last one."""
    each = [f"{times.name}: {what}" for times in steps for what in ("launches", "ms", "share")]
    return ["class", *each, "of the copy rate"]


def class_cells(steps: Sequence[KernelTimes]) -> list[list[str]]:
    """A row a class that any step has, and one of the gaps."""
    found = []
    for kind in CLASSES:
        rows = [next((row for row in times.rows if row.kind == kind), None) for times in steps]
        if not any(rows):
            continue
        cells = [kind]
        for row, times in zip(rows, steps, strict=True):
            cells += (
                ["", "", ""]
                if row is None
                else [
                    f"{row.launches:,}",
                    f"{row.milliseconds:,.2f}",
                    f"{100 * row.milliseconds / times.step:.0f} %",
                ]
            )
        last = rows[-1]
        share = None if last is None else share_of_copying(last, steps[-1])
        found.append([*cells, "" if share is None else f"{100 * share:.0f} %"])
    gaps = [
        cell
        for times in steps
        for cell in ("", f"{times.gaps:,.2f}", f"{100 * times.gaps / times.step:.0f} %")
    ]
    return [*found, ["gaps", *gaps, ""]]


def kernel_tables(steps: Sequence[KernelTimes]) -> list[Table]:
    """Launching against computing, and the classes of kernels of each step."""
    launches = Table(title="launches against compute")
    for column in LAUNCHES:
        launches.add_column(column, justify="left" if column == "step" else "right")
    for times in steps:
        launches.add_row(*launch_cells(times))
    return [launches, *(_classes(times) for times in steps)]


def _classes(times: KernelTimes) -> Table:
    """One step's classes: side by side two steps are wider than a terminal."""
    table = Table(title=f"kernels by class, {times.name}")
    for column in ("class", "launches", "ms", "share", "of the copy rate"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for row in class_cells([times]):
        table.add_row(*row)
    return table


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
