"""``econmt profile --diff`` shows what changed between two profiles or accounts."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.unit.cli.conftest import Call


def write(path: Path, entries: list[tuple[str, str, int]]) -> Path:
    """Writes a file of an account."""
    rows = [{"category": category, "layer": name, "bytes": size} for category, name, size in entries]
    path.write_text(json.dumps({"ledger": {"entries": rows}}))
    return path


def test_what_changed(call: Call, tmp_path: Path) -> None:
    one = write(tmp_path / "a.json", [("weights", "head", 4_000), ("workspace", "other", 500)])
    two = write(tmp_path / "b.json", [("weights", "head", 9_000), ("feature maps", "body", 700)])
    ended = call("profile", "--diff", one, two)
    assert ended.code == 0, ended.err
    cells = [re.sub("[│┃]", " ", line).split() for line in ended.lines]
    assert ["head", "weights", "4.0", "kB", "9.0", "kB", "+5.0", "kB"] in cells
    assert ["outside", "of", "modules", "workspace", "500", "B", "0", "B", "-500", "B"] in cells
    assert ["all", "4.5", "kB", "9.7", "kB", "+5.2", "kB"] in cells
    assert "No such file" in call("profile", "--diff", one, tmp_path / "c.json").err
