"""Whole reports as text files in the folder ``golden``; with GOLDEN=write in the environment they are written again."""

from __future__ import annotations

import os
from pathlib import Path


def assert_golden(name: str, report: str) -> None:
    """Compares a report with that of a file, line by line."""
    path = Path(__file__).with_name("golden") / f"{name}.txt"
    lines = [line.rstrip() for line in report.splitlines()]
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert lines == path.read_text(encoding="utf-8").splitlines()
