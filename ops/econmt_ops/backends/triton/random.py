"""Counter-based random bits, a function of a seed and an element's index, for dropout masks on a GPU.

Philox 4x32-10 (Salmon, Moraes, Dror and Shaw 2011), with the seed as key and the index of a group of eight elements as
counter, gives 128 bits, 16 per element, the lower half of a word first. `econmt_ops.products.dropout` has the same
function in PyTorch, bit for bit, so that masks are recomputed where needed instead of stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_GROUPS = 256
"""Groups of eight elements per program."""

_ROW_GROUPS = 64
"""Maximum groups per program if a program handles several positions of a row."""

_POSITIONS = 8
"""Positions of a row per program in that case."""


@triton.jit
def derive(seed, index):
    """Returns the seed of the index-th mask of a call, as `products.dropout.derive_seed`; the seed, if index < 0."""
    state = seed.to(tl.uint64) + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return tl.where(index < 0, seed.to(tl.uint64), (state ^ (state >> 31)) >> 1)


@triton.jit
def _keep_groups(seed, group, threshold):
    """Returns True for the elements (8 G,) of groups (G,), int64, that are kept.

    ``threshold`` of the 65,536 values of an element's bits mean "keep", see
    `econmt_ops.products.dropout.keep_threshold`.
    """
    low, high = (group & 0xFFFFFFFF).to(tl.uint32), (group >> 32).to(tl.uint32)
    first, second, third, fourth = tl.philox(seed, low, high, high * 0, high * 0)
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (group.shape[0] * 8,)).to(tl.int32) < threshold


@triton.jit(do_not_specialize=["index", "threshold", "positions", "first"])
def dropout_values(
    seed_pointer, index, threshold, scale, values, results, positions, width, first, row_stride, position_stride,
    mask_row, mask_position, ALIGNED: tl.constexpr, GROUPS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Applies dropout to a tile of columns at some positions; values and results (B, T, W), with the given strides.

    Without values the results are the mask, bytes.

    A row of the mask begins at the element ``first`` + row mask_row + position mask_position, with ALIGNED always the
    first of a group.
    """
    seed = derive(tl.load(seed_pointer), index)
    # One axis for all: a grid has 65,535 programs at most along the others.
    tile, tiles = tl.program_id(0), tl.cdiv(width if ALIGNED else width + 7, 8 * GROUPS)
    span, spans = tile // tiles, tl.cdiv(positions, POSITIONS)
    row, block = (span // spans).to(tl.int64), (tile % tiles).to(tl.int64) * GROUPS
    start = (span % spans).to(tl.int64) * POSITIONS
    for position in range(start, tl.minimum(start + POSITIONS, positions)):
        begin = first.to(tl.int64) + row * mask_row + position * mask_position
        kept = _keep_groups(seed, begin // 8 + block + tl.arange(0, GROUPS), threshold)
        column = block * 8 + tl.arange(0, 8 * GROUPS)
        if not ALIGNED:  # otherwise rows are loaded 16 bytes at a time
            column -= begin % 8
        within = (column >= 0) & (column < width)
        place = row * row_stride + position * position_stride + column
        if values is None:
            tl.store(results + place, kept.to(tl.int8), mask=within)
        else:
            value = tl.load(values + place, mask=within, other=0.0)
            dropped = tl.where(kept, value.to(tl.float32) * scale, 0.0)
            tl.store(results + place, dropped.to(value.dtype), mask=within)


def keep_mask(elements: int, seed: Tensor, index: int, threshold: int, first: int = 0) -> Tensor:
    """Returns the bool mask (elements,) from the ``first`` element on, as `econmt_ops.products.dropout.keep_mask`.

    The seed is an int64 scalar tensor on the device; ``threshold`` of the 65,536 values of an element's bits mean
    "keep".
    """
    mask = torch.empty(elements, dtype=torch.bool, device=seed.device)
    if elements:
        dropout_values[(triton.cdiv(elements + first % 8, 8 * _GROUPS),)](
            seed, index, threshold, 1.0, None, mask.view(torch.int8), 1, elements, first, 0, 0, 0, 0,
            ALIGNED=first % 8 == 0, GROUPS=_GROUPS, POSITIONS=1,
        )  # fmt: skip
    return mask


def results_like(values: Tensor) -> Tensor:
    """Allocates the results of `dropout`: time-first if values (B, T, W) are stored so, otherwise contiguous."""
    rows, positions, width = values.stride() if values.dim() == 3 else (0, 0, 0)
    if width == 1 and positions == values.shape[0] * rows and rows == values.shape[2]:
        return torch.empty_like(values)
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def dropout(
    values: Tensor,
    seed: Tensor,
    index: int,
    threshold: int,
    scale: float,
    variational: bool,
    first_row: int = 0,
) -> Tensor:
    """Applies dropout to values (B, T, ...) of at most 32 bits in one kernel, which computes the mask as it reads them.

    The results have the memory layout of `results_like`; ``scale`` is the factor of the values that are kept. For the
    others see `keep_mask` and `econmt_ops.products.dropout.dropout`.
    """
    results = results_like(values)
    if results.is_contiguous():
        values = values.contiguous()
    if not values.numel():
        return results
    groups, block = _GROUPS, 1
    strides: Sequence[int] = (0, 0)
    rows, positions, width = 1, 1, values.numel()
    if variational or not values.is_contiguous():
        rows, positions = values.shape[:2]
        width, strides = values.numel() // (rows * positions), results.stride()[:2]
        groups, block = min(_ROW_GROUPS, triton.next_power_of_2(width // 8 + 1)), _POSITIONS
    mask_row, mask_position = (width, 0) if variational else (positions * width, width)
    first = first_row * (width if variational else values.numel() // values.shape[0])
    aligned = width % 8 == 0 and first % 8 == 0
    # An unaligned row may need one group more: its first elements can be in the last group of the previous row.
    tiles = triton.cdiv(width if aligned else width + 7, 8 * groups)
    dropout_values[(tiles * triton.cdiv(positions, block) * rows,)](
        seed, index, threshold, scale, values, results, positions, width, first, *strides, mask_row, mask_position,
        ALIGNED=aligned, GROUPS=groups, POSITIONS=block,
    )  # fmt: skip
    return results
