"""Blocks of steps and parts of rows cover everything once and fit their workspaces."""

from __future__ import annotations

import pytest
import torch

from econmt_ops.core import chunks
from econmt_ops.core.chunks import split_blocks, split_rows


@pytest.mark.parametrize(
    ("rows", "positions", "width", "expected"),
    [
        (7, 10, 10, [(0, 3), (3, 6), (6, 9)]),
        (7, 10, 40, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]),  # a row alone is too large
        (2, 0, 0, [(0, 300)]),
        (0, 10, 10, [(0, 3)]),
    ],
)
def test_parts_of_rows(
    monkeypatch: pytest.MonkeyPatch, rows: int, positions: int, width: int, expected: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(chunks, "_PART_BYTES", 300)
    assert [(part.start, part.stop) for part in split_rows(rows, positions, width)] == expected


@pytest.mark.parametrize(
    ("dtype", "large", "expected"),
    [
        (torch.float32, False, [(0, 1), (1, 3), (3, 5)]),
        (torch.bfloat16, False, [(0, 1), (1, 5)]),
        (torch.float32, True, [(0, 2), (2, 5)]),
        (torch.float64, False, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
    ],
)
def test_the_first_block_of_steps_may_be_shorter(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, large: bool, expected: list[tuple[int, int]]
) -> None:
    """Gates of 3 rows and 5 units in float32 take 240 bytes a step."""
    monkeypatch.setattr(chunks, "_BLOCK_BYTES", 2 * 240)
    monkeypatch.setattr(chunks, "_LARGE_BLOCK_BYTES", 4 * 240)
    assert split_blocks(5, 3, 5, dtype, large) == expected


def test_large_blocks_are_nearly_even() -> None:
    """Echo's batch: four launches as with blocks of 32 steps, and a first block that has room for copies."""
    blocks = split_blocks(100, 128, 512, torch.bfloat16, large=True)
    assert blocks == [(0, 22), (22, 48), (48, 74), (74, 100)]
    assert split_blocks(3, 128, 512, torch.bfloat16, large=True) == [(0, 3)]
    assert split_blocks(0, 128, 512, torch.bfloat16, large=True) == []
