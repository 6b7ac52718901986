"""Blocks of steps and rows, and what stash levels keep."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from econmt_ops.core import chunks
from econmt_ops.core.chunks import STASHES, previous, reaches, rows_of, split_blocks, split_rows


def test_each_level_keeps_what_those_before_it_keep() -> None:
    for stash, level in product(STASHES, repeat=2):
        assert reaches(stash, level) == (level in STASHES[: STASHES.index(stash) + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("large", [False, True])
def test_blocks_of_steps_fit_the_workspace(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, large: bool
) -> None:
    """All of one length but the first, which is not longer; large ones are as few as may be, and nearly even."""
    echo = split_blocks(100, 128, 512, torch.bfloat16, large=True)
    assert echo == [(0, 22), (22, 48), (48, 74), (74, 100)], "the first one has room for copies"
    monkeypatch.setattr(chunks, "_BLOCK_BYTES", 960)
    monkeypatch.setattr(chunks, "_LARGE_BLOCK_BYTES", 1920)
    for steps, batch, hidden, stash in product(
        range(40), (1, 2, 5), (1, 3, 7, 13), ("least", "outputs", "gates")
    ):
        blocks = split_blocks(steps, batch, hidden, dtype, large, stash)
        matrices = 2 * 4 * hidden * hidden * dtype.itemsize
        room = (max(1920, matrices) if large else 960) // (2 if stash == "least" else 1)
        most = max(1, room // (batch * 4 * hidden * dtype.itemsize))
        sizes = [end - begin for begin, end in blocks]
        assert [step for begin, end in blocks for step in range(begin, end)] == list(range(steps))
        assert all(size <= most for size in sizes)
        assert len(set(sizes[1:])) <= 1
        assert all(sizes[0] <= size for size in sizes)
        assert len(blocks) == -(-steps // most)
        if not large and len(blocks) > 1:
            assert sizes[-1] == most
        if large and len(blocks) > 1:  # the first one is shorter by an eighth of a block, but for whole steps
            assert sizes[-1] - sizes[0] <= max(1, sizes[-1] // 8 + len(blocks))


@pytest.mark.parametrize(
    ("batch", "positions", "parts"),
    [(0, 3, 1), (1, 3, 1), (4, 3, 1), (5, 3, 2), (9, 3, 3), (3, 99, 3), (5, 0, 1)],
)
def test_parts_of_a_batch_fit_the_workspace(
    monkeypatch: pytest.MonkeyPatch, batch: int, positions: int, parts: int
) -> None:
    monkeypatch.setattr(chunks, "_PART_BYTES", 4 * 3 * 10)
    found = split_rows(batch, positions, 10)
    rows = list(range(batch))
    assert [row for part in found for row in rows[part]] == rows
    assert len(found) == parts


def test_entries_before_a_block() -> None:
    sequence, first = torch.arange(5)[:, None, None].float(), torch.tensor([[-1.0]])
    whole = torch.cat([first[None], sequence])
    for begin, end in [*pairwise(range(6)), (0, 5), (2, 5), (1, 4)]:
        assert torch.equal(previous(sequence, first, begin, end), whole[begin:end])


def test_rows_are_copied_only_if_their_values_are_not_neighbours() -> None:
    whole = torch.arange(12.0).view(3, 4)
    for rows in (whole, whole[:, 1:3], whole[::2]):
        assert rows_of(rows) is rows
    copy = rows_of(whole.t())
    assert torch.equal(copy, whole.t())
    assert copy.is_contiguous()
