"""The ways of reading that ``checksums`` times."""

from __future__ import annotations

from econmt.checkpoint import tensor_files
from scripts.tests.conftest import Measured


def test_every_way_of_reading_has_a_row(measured: Measured) -> None:
    check = tensor_files.check_tensors
    rows = measured("checksums", "--megabytes", 1)
    for words in ("read without checksum", "read with checksum", "read back", "sample", "--verify"):
        (row,) = (row for row in rows if words in row["file"])
        assert row["MB"] == 1
        assert min(row["warm"], row["cold"]) >= 0
    assert tensor_files.check_tensors is check
