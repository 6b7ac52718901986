"""What the verbs that measure share: devices and files, rows kept and printed, and what is being done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from econmt.bench.sheet import Row, Say, append_csv, circumstances, read_csv, table
from econmt.errors import InputError
from econmt.training.devices import resolve_device

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def where(device: str, *files: Path | None) -> torch.device:
    """The device; files that cannot be written are refused before anything is measured."""
    for path in files:
        if path is not None and path.is_dir():
            raise InputError(f"{path}: a folder; give the name of a file")
        if path is not None and not path.parent.is_dir():
            raise InputError(f"{path.parent}: no such folder")
    return resolve_device(device)


def dtype(name: str) -> torch.dtype:
    """The type of this name; InputError if it is none."""
    if name not in _DTYPES:
        raise InputError(f"--dtype '{name}': give float32 or bfloat16")
    return _DTYPES[name]


def kept(rows: Iterable[Row], csv: Path | None, where: torch.device) -> list[Row]:
    """The rows; each is in the file as soon as it is measured."""
    fixed = circumstances(where)
    if csv is not None:
        read_csv(csv)
    kept = []
    for row in rows:
        kept.append(row)
        if csv is not None:
            append_csv(csv, [row], fixed)
    return kept


def rows_before(csv: Path | None, where: torch.device, fixed: Row) -> list[dict[str, str]]:
    """Rows that the file has already, of this machine and these libraries, in which ``fixed`` holds."""
    if csv is None:
        return []
    same = ("processor", "gpu", "threads", "torch", "econmt_ops")
    fixed = {**fixed, **{name: value for name, value in circumstances(where).items() if name in same}}
    return [
        row
        for row in read_csv(csv)[1]
        if all(row.get(name, "") == str(value) for name, value in fixed.items())
    ]


def print_rows(rows: Sequence[Row], columns: Iterable[str], title: str) -> None:
    """Prints some columns of rows as a table."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=180)
    console.print(table(rows, columns, title))


@contextmanager
def progress() -> Iterator[Say]:
    """Something that says on a terminal what is being done."""
    with Console(stderr=True, highlight=False).status("") as status:
        yield lambda text: status.update(text)
