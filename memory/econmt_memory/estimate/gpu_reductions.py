"""Memory of reductions on a GPU (PyTorch 2.11, aten/src/ATen/native/cuda/Reduce.cuh).

A reduction with few results is divided among blocks of threads, which exchange partial results in memory. The number
of blocks depends on the GPU; it is that of an H100 or H200.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from econmt_memory.estimate.allocator import round_up
from econmt_memory.measure.storages import BLOCK

aten = torch.ops.aten

_PROCESSORS = 132
_THREADS_OF_PROCESSOR = 2048
_THREADS = 512
"""Most threads of a block (mnt_wrapper)."""
_WARP = 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256
"""Bounds for the number of values that a thread reduces."""
_VECTOR = 4


def _up(size: int, parts: int) -> int:
    return -(-size // parts)


def _power(size: int) -> int:
    """Returns the largest power of two that is not larger."""
    return 1 << (max(1, size).bit_length() - 1)


def _coalesced(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges neighbouring dimensions (size, stride), in ascending order of strides."""
    merged: list[tuple[int, int]] = []
    for size, stride in sorted((each for each in sizes if each[0] > 1), key=lambda each: each[1]):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = merged[-1][0] * size, merged[-1][1]
        else:
            merged.append((size, stride))
    return merged


def reduction_buffers(inputs: Tensor, dims: Sequence[int] | None, width: int = 4) -> list[int]:
    """Returns the bytes of the buffers that a reduction allocates: partial results and semaphores, or none.

    Args:
        inputs: Tensor to reduce.
        dims: Dimensions to reduce; none or an empty sequence: all.
        width: Bytes of a partial result.
    """
    count = inputs.dim()
    reduced_dims = {dim % count for dim in dims} if dims else set(range(count))
    sizes = list(zip(inputs.shape, inputs.stride(), strict=True))
    reduced = _coalesced([sizes[dim] for dim in range(count) if dim in reduced_dims])
    kept = _coalesced([sizes[dim] for dim in range(count) if dim not in reduced_dims])
    inside, outputs = (prod(size for size, _ in dimensions) for dimensions in (reduced, kept))
    if inside <= 1 or not inputs.numel():
        return []
    along_inputs = not kept or reduced[0][1] < kept[0][1]
    first, second = (inside, outputs) if along_inputs else (outputs, inside)
    vector = 1
    if (reduced if along_inputs else kept)[0][1] == 1:
        if not along_inputs:
            vector = _output_vector(kept, reduced)
            first //= vector
        elif first > 128 and len(reduced) == 1:
            first //= _VECTOR
    most = _THREADS // vector
    first, second = _power(min(first, most)), _power(min(second, most))
    block_width = min(first, _WARP)
    block_height = min(second, most // block_width)
    block_width = min(first, most // block_height)
    step_input, step_output = (block_width, 1) if along_inputs else (1, block_width)
    values = _up(inside, step_input)
    divided = values >= block_height * 16 or values >= _MOST_VALUES
    if divided:
        step_input *= block_height
    else:
        step_output *= block_height
    values = _up(inside, step_input)
    target = _PROCESSORS * (_THREADS_OF_PROCESSOR // (block_width * block_height))
    grid = _up(outputs // vector, step_output)
    if not divided or values < _MOST_VALUES or grid > target:
        return []
    blocks = max(min(_up(target, grid), _up(values, _FEWEST_VALUES)), _up(values, _MOST_VALUES))
    if blocks <= 1:
        return []
    partial = width * outputs * blocks * (1 if along_inputs else block_width * vector)
    return [partial, 4 * grid]


def _output_vector(kept: list[tuple[int, int]], reduced: list[tuple[int, int]]) -> int:
    """Returns the number of neighbouring results that a thread computes."""
    vector = _VECTOR
    for number in (kept[0][0], *(stride for _, stride in [*reduced, *kept[1:]])):
        while number % vector:
            vector //= 2
    return vector


def reduction(inputs: Tensor, *settings: Any, **_: Any) -> int:
    """Returns the bytes that a sum, mean or norm of dimensions, which are a list, needs besides its result."""
    dims = next((each for each in settings if isinstance(each, list)), None)
    return sum(round_up(size, BLOCK) for size in reduction_buffers(inputs, dims))


_REDUCTIONS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
REDUCTIONS: dict[Any, Callable[..., int]] = dict.fromkeys(
    (*_REDUCTIONS, aten.linalg_vector_norm.default), reduction
)
"""Bytes by operator."""
