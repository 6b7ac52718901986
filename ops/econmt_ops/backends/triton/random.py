"""Random bits that depend on nothing but a seed and the number of an element: dropout's masks on a GPU.

Philox 4x32-10 (Salmon, Moraes, Dror and Shaw 2011) with the seed as its key and the number of a group of eight elements
as its counter gives 128 bits, 16 an element, the lower half of a word first. `econmt_ops.core.dropout` has the same in
PyTorch, bit for bit, so that whoever needs a mask may make it where it is needed, or again, instead of keeping it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GROUPS = 256
"""Groups of eight elements that a program makes at once."""

_ROW_GROUPS = 64
"""The same, at most, where a program takes several positions of a row."""

_POSITIONS = 8
"""So many."""


@triton.jit
def derive(seed, index):
    """The seed of the index-th mask of a call: `econmt_ops.core.dropout.derive_seed`; a negative index: the seed."""
    state = seed.to(tl.uint64) + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return tl.where(index < 0, seed.to(tl.uint64), (state ^ (state >> 31)) >> 1)


@triton.jit
def _words(seed, group):
    """The four words of groups of eight elements, int64."""
    low = (group & 0xFFFFFFFF).to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, high * 0, high * 0)


@triton.jit
def keep(seed, element, threshold):
    """Whether elements are kept.

    Args:
        seed: a number of 64 bits; of the index-th mask, that of `derive`.
        element: numbers of elements, of 32 or 64 bits, not negative, in a block of any shape.
        threshold: of 65,536; `econmt_ops.core.dropout.keep_threshold`.
    """
    element = element.to(tl.int64)
    first, second, third, fourth = _words(seed, element >> 3)
    place = (element & 7).to(tl.int32)
    word = tl.where(place < 4, tl.where(place < 2, first, second), tl.where(place < 6, third, fourth))
    bits = (word >> ((place & 1) * 16).to(tl.uint32)) & 0xFFFF
    return bits.to(tl.int32) < threshold


@triton.jit
def _keep_groups(seed, group, threshold):
    """Whether the elements (8 G,) of groups (G,), int64, are kept: `keep` with an eighth of its work."""
    first, second, third, fourth = _words(seed, group)
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (group.shape[0] * 8,)).to(tl.int32) < threshold


@triton.jit(do_not_specialize=["index", "threshold", "first"])
def dropout_mask(
    seed_pointer,
    index,
    threshold,
    mask,
    elements,
    first,
    GROUPS: tl.constexpr,
):
    """mask (N,) of bytes: of the elements from the ``first`` on."""
    seed = derive(tl.load(seed_pointer), index)
    begin = tl.program_id(0).to(tl.int64) * GROUPS + first.to(tl.int64) // 8
    element = begin * 8 - first.to(tl.int64) + tl.arange(0, 8 * GROUPS)
    kept = _keep_groups(seed, begin + tl.arange(0, GROUPS), threshold)
    tl.store(mask + element, kept.to(tl.int8), mask=(element >= 0) & (element < elements))


@triton.jit
def _columns(seed, begin, threshold, GROUPS: tl.constexpr, ALIGNED: tl.constexpr):
    """A program's columns (8 G,) of a row whose mask begins at an element, and whether each is kept."""
    block = tl.program_id(0).to(tl.int64) * GROUPS
    kept = _keep_groups(seed, begin // 8 + block + tl.arange(0, GROUPS), threshold)
    column = block * 8 + tl.arange(0, 8 * GROUPS)
    # So written, a row that begins with a group is read 16 bytes at a time.
    return column if ALIGNED else column - begin % 8, kept


@triton.jit
def _drop(value, kept, scale):
    return tl.where(kept, value.to(tl.float32) * scale, 0.0).to(value.dtype)


@triton.jit(do_not_specialize=["index", "threshold", "positions", "first"])
def dropout_values(
    seed_pointer,
    index,
    threshold,
    scale,
    values,
    results,
    positions,
    width,
    first,
    row_stride,
    position_stride,
    SHARED: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """values and results (B, T, W), with these strides of rows and positions; a program: columns at some positions.

    The mask is that of the elements (B, T, W) from the ``first`` on or, SHARED, of (B, 1, W). ALIGNED: each of its rows
    begins with a group.
    """
    seed = derive(tl.load(seed_pointer), index)
    row = tl.program_id(2).to(tl.int64)
    values += row * row_stride
    results += row * row_stride
    start = tl.program_id(1).to(tl.int64) * POSITIONS
    if SHARED:
        column, kept = _columns(seed, first.to(tl.int64) + row * width, threshold, GROUPS, ALIGNED)
        position = start + tl.arange(0, POSITIONS)
        within = (position < positions)[:, None] & ((column >= 0) & (column < width))[None, :]
        place = position[:, None] * position_stride + column[None, :]
        value = tl.load(values + place, mask=within, other=0.0)
        tl.store(results + place, _drop(value, kept[None, :], scale), mask=within)
    else:
        for position in range(start, tl.minimum(start + POSITIONS, positions)):
            begin = first.to(tl.int64) + (row * positions + position) * width
            column, kept = _columns(seed, begin, threshold, GROUPS, ALIGNED)
            within = (column >= 0) & (column < width)
            place = position * position_stride + column
            value = tl.load(values + place, mask=within, other=0.0)
            tl.store(results + place, _drop(value, kept, scale), mask=within)


def keep_mask(elements: int, seed: Tensor, index: int, threshold: int, first: int = 0) -> Tensor:
    """The bool mask (elements,) from the ``first`` element on; as `econmt_ops.core.dropout.keep_mask`.

    Args:
        elements: how many.
        seed: a scalar int64 tensor on the device.
        index: of the mask, or negative.
        threshold: how many of 65,536 are kept.
        first: the number of the first element.
    """
    mask = torch.empty(elements, dtype=torch.bool, device=seed.device)
    if elements:
        grid = (triton.cdiv(elements + first % 8, 8 * _GROUPS),)
        dropout_mask[grid](seed, index, threshold, mask.view(torch.int8), elements, first, GROUPS=_GROUPS)
    return mask


def results_like(values: Tensor) -> Tensor:
    """Room for what `dropout` makes: as the values (B, T, W) lie if positions come before rows, else row after row."""
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
    """Dropout of values (B, T, ...) in one kernel, which makes the mask as it reads them.

    Args:
        values: (B, T, ...), of no more than 32 bits; the results lie in memory as `results_like` says.
        seed, index, threshold: as for `keep_mask`.
        scale: what is kept is multiplied by it.
        variational: the mask is (B, 1, ...).
        first_row: the number of the first row.
    """
    results = results_like(values)
    if results.is_contiguous():
        values = values.contiguous()
    if not values.numel():
        return results
    first = first_row * (values.numel() // values.shape[0])
    strides = 0, 0
    groups, block = _GROUPS, 1
    if variational or not values.is_contiguous():
        rows, positions = values.shape[:2]
        width = values.numel() // (rows * positions)
        strides = results.stride(0), results.stride(1)
        if variational:
            first = first_row * width
        groups, block = min(_ROW_GROUPS, triton.next_power_of_2(width // 8 + 1)), _POSITIONS
    else:
        rows, positions, width = 1, 1, values.numel()
    aligned = width % 8 == 0 and first % 8 == 0
    # Or one group more: that of a row's first elements may begin in the row before.
    grid = (triton.cdiv(width if aligned else width + 7, 8 * groups), triton.cdiv(positions, block), rows)
    dropout_values[grid](
        seed,
        index,
        threshold,
        scale,
        values,
        results,
        positions,
        width,
        first,
        *strides,
        SHARED=variational,
        ALIGNED=aligned,
        GROUPS=groups,
        POSITIONS=block,
    )
    return results
