"""Rows of a benchmark: tables, CSV files that rows are appended to, and bar charts."""

from __future__ import annotations

import csv
import io
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.table import Table

import econmt
from econmt.checkpoint.tensor_files import write_text
from econmt.data.files import writing
from econmt.data.progress_bars import Say as Say
from econmt.errors import InputError
from econmt_memory.report.tables import ReportTable
from econmt_ops.dispatch.measurements import processor, sources

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Value = str | int | float
Row = dict[str, Value]


def circumstances(device: torch.device) -> Row:
    """Returns the conditions of a measurement: date, commit, machine, versions, threads."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "commit": _commit(),
        "processor": processor(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "econmt": econmt.__version__,
        "econmt_ops": sources(),
    }


def _commit() -> str:
    """Returns the commit of the checkout that contains this package; empty if there is none."""
    checkout = Path(__file__).resolve().parents[2]
    git = shutil.which("git")
    if git is None or not (checkout / ".git").exists():
        return ""
    command = [git, "-C", str(checkout), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()[:7]  # noqa: S603


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Reads columns and rows of a CSV that :func:`append_csv` wrote; none if there is no such file."""
    if not path.exists():
        return [], []
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            rows = list(reader)
            columns = list(reader.fieldnames or [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as CSV ({error}); give another file") from None
    if "bench" not in columns or any(None in row or None in row.values() for row in rows):
        raise InputError(f"{path}: not a table of econmt bench; give another file")
    return columns, rows


def append_csv(path: Path, rows: Sequence[Row], fixed: Mapping[str, Value]) -> None:
    """Appends rows, each with the values in ``fixed``, to a CSV; new columns come after the existing ones."""
    columns, old = read_csv(path)
    with writing(path):
        write_text(path, csv_text([*old, *({**row, **fixed} for row in rows)], columns))


def csv_text(rows: Sequence[Mapping[str, Value]], columns: Iterable[str] = ()) -> str:
    """Returns rows as CSV with a line of headings: ``columns``, then all others in the order of the rows."""
    names = dict.fromkeys([*columns, *(name for row in rows for name in row)])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table(rows: Sequence[Row], columns: Iterable[str], title: str) -> Table:
    """Makes a table of some columns of rows."""
    names = [name for name in columns if any(name in row for row in rows)]
    left = [
        number for number, name in enumerate(names) if any(isinstance(row.get(name, 0), str) for row in rows)
    ]
    cells = [[shown(row.get(name, "")) for name in names] for row in rows]
    return ReportTable(title, names, cells, left=left).for_terminal()


def shown(value: Value) -> str:
    """Formats a value with three or four significant digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def draw(rows: Sequence[Row], path: Path, *, label: Sequence[str], value: str, title: str) -> None:
    """Draws one bar a row that has a ``value``, which is its length; the columns ``label`` name it."""
    from matplotlib.figure import Figure

    shown_rows = [row for row in rows if value in row]
    names = [", ".join(str(row[name]) for name in label if row.get(name, "") != "") for row in shown_rows]
    figure = Figure(figsize=(10, 1.5 + 0.22 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(names, [float(row[value]) for row in shown_rows], color="#33658a")
    axes.invert_yaxis()
    axes.set_xlabel(value)
    axes.set_title(title)
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a picture; raises InputError if that fails."""
    with writing(path):
        figure.savefig(path, dpi=110, format=path.suffix.lower().removeprefix("."))
