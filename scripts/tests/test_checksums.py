from __future__ import annotations

import pytest

from econmt.checkpoint import tensor_files
from scripts.bench.checksums import main


def test_the_table_has_a_row_for_each_way_of_reading(capsys: pytest.CaptureFixture[str]) -> None:
    check = tensor_files.check_tensors
    main(["--megabytes", "1"])
    said = capsys.readouterr().out
    for words in ("read without checksum", "read with checksum", "read back", "sample", "--verify"):
        (row,) = (line for line in said.splitlines() if words in line)
        cells = [cell.strip() for cell in row.split("│")]
        assert cells[1] == "1"
        assert all(float(cell) >= 0 for cell in cells[3:5])
    assert tensor_files.check_tensors is check
