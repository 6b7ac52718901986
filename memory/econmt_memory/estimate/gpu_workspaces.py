"""Bytes that PyTorch's operators need on a GPU beyond their results.

Rules name files of PyTorch 2.11 below aten/src/ATen/native. Those of cuDNN's convolutions were measured on an H100 with
cuDNN 9.19 (94 shapes): its heuristics choose a kernel, and with it a workspace, on the GPU; without one its choice is
assumed. Kernels read and write the channels last: unless tensors are stored like that, a workspace holds such copies of
inputs, outputs and weights, with channels in multiples of 16 bytes. The gradient of weights adds sums that are divided
among processors.

A reduction with few results is divided among blocks of threads, which exchange partial results in memory
(cuda/Reduce.cuh). The number of blocks depends on the GPU; it is that of an H100 or H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from econmt_memory.estimate.allocator import cublas_workspace, round_up
from econmt_memory.estimate.cpu_workspaces import has_rows
from econmt_memory.measure.storages import BLOCK

aten = torch.ops.aten

_PARTS = ((200_000, 14), (700_000, 7), (3_000_000, 3))
"""Partial sums of a float32 gradient by the most bytes of the weights; larger ones have one of 6 MiB."""
_FEW = 4
"""Channels of inputs or outputs for which other kernels are chosen."""


def _copy(tensor: Tensor) -> int:
    """Returns the bytes of a copy with the channels last; 0 if they are last already."""
    if suggest_memory_format(tensor) is torch.channels_last:
        return 0
    count, width = tensor.shape[1], tensor.element_size()
    return tensor.numel() // count * round_up(count, 16 // width) * width


def _copies(inputs: Tensor, outputs: Tensor, weight: Tensor, groups: int) -> int:
    """Returns the bytes of copies of all tensors of a convolution."""
    outer, inner = weight.shape[0], weight.shape[1]
    if (groups > 1 and inner == 1) or not weight.numel() or not _copy(inputs):
        return 0  # depthwise, or the channels are last
    step = 16 // weight.element_size()
    window = weight[0, 0].numel()
    kernel = round_up(outer, step) * round_up(inner, step) * window * weight.element_size()
    return _copy(inputs) + _copy(outputs) + (0 if window == 1 or groups > 1 else kernel)


def _is_wide(inputs: Tensor, weight: Tensor, stride: Any) -> bool:
    """Returns True for products of each position of a large image, which need no copies."""
    return weight[0, 0].numel() == 1 and set(stride) == {1} and inputs[0, 0].numel() >= 56 * 56


def convolution(inputs: Tensor, weight: Tensor, _bias: Any, stride: Any, *settings: Any) -> int:
    """Returns the bytes that a convolution needs besides its result."""
    if (inputs.shape[1] <= _FEW and inputs.numel() < 1 << 20) or _is_wide(inputs, weight, stride):
        return 0
    with torch._C._DisableTorchDispatch():
        plain = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            for each in (inputs, weight)
        ]
        outputs = aten.convolution(*plain, None, stride, *settings)
    return _copies(inputs, outputs, weight, settings[4])


def convolution_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, _bias: Any, stride: Any, *settings: Any
) -> int:
    """Returns the bytes that the gradients of a convolution need besides the results."""
    groups, needed = settings[4], settings[5]
    if _is_wide(inputs, weight, stride):
        return 1 << 20
    copies = _copies(inputs, gradient, weight, groups)
    if not needed[1] or not copies or weight.element_size() == 2:
        return copies
    window = weight[0, 0].numel()
    if gradient.shape[1] <= _FEW:  # the only shape measured has 2.28 times its inputs
        return round(2.28 * _copy(inputs))
    if inputs.shape[1] <= _FEW:
        return copies
    if window == 1:
        return copies + (2 * weight.nbytes if weight.nbytes < 1 << 20 else 0)
    parts = next((count for most, count in _PARTS if weight.nbytes <= most), 0)
    large = 6 << 20 if weight.nbytes > 6_000_000 else 0
    return copies + parts * weight.nbytes + large


_PROCESSORS = 132
_THREADS_OF_PROCESSOR = 2048
_THREADS = 512
"""Most threads of a block (mnt_wrapper)."""
_WARP = 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256
"""Bounds for the number of values that a thread reduces."""
_VECTOR = 4


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


def reduction_buffers(inputs: Tensor, dims: Sequence[int] | None) -> list[int]:
    """Returns the bytes of the buffers that a reduction allocates: partial results and semaphores, or none.

    Args:
        inputs: Tensor to reduce.
        dims: Dimensions to reduce; none or an empty sequence: all.
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
    values = ceil(inside / step_input)
    divided = values >= block_height * 16 or values >= _MOST_VALUES
    if divided:
        step_input *= block_height
    else:
        step_output *= block_height
    values = ceil(inside / step_input)
    target = _PROCESSORS * (_THREADS_OF_PROCESSOR // (block_width * block_height))
    grid = ceil(outputs // vector / step_output)
    if not divided or values < _MOST_VALUES or grid > target:
        return []
    blocks = max(min(ceil(target / grid), ceil(values / _FEWEST_VALUES)), ceil(values / _MOST_VALUES))
    if blocks <= 1:
        return []
    partial = 4 * outputs * blocks * (1 if along_inputs else block_width * vector)
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


_BY_CUBLAS = frozenset(
    getattr(aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addbmm", "_addmm_activation")
)


class Workspaces:
    """Memory that operators need beyond their results, by the arguments of their calls.

    cuBLAS has a workspace for each thread that calls it, from the first call on: the thread that runs the program, and
    the one that runs backward passes on a GPU (ATen/cuda/CublasHandlePool.cpp).

    Args:
        label: Sets category and layer of a tensor's memory.
    """

    def __init__(self, label: Callable[[Tensor, str, str], None]) -> None:
        self._label = label
        self._of_threads: dict[Any, Tensor] = {}

    def __call__(self, func: Any) -> Callable[..., int] | None:
        """Returns a function that gives an operator's internal bytes for its arguments; None if it needs none."""
        packet = getattr(func, "overloadpacket", None)
        return partial(self._use_cublas, packet) if packet in _BY_CUBLAS else _WORKSPACES.get(func)

    def _use_cublas(self, packet: Any, first: Tensor, *others: Any, **_: Any) -> int:
        backward = torch._C._current_graph_task_id() >= 0
        self._begin(backward, cublas_workspace())
        if packet is aten.addmm and first.dim() == 1:
            # A product to which a vector is added uses cuBLASLt, whose workspace is another 1 MiB.
            self._begin(("Lt", backward), 1 << 20)
        factors = (each for each in (first, *others) if isinstance(each, Tensor))
        # Others are copied first (cuda/Blas.cpp, prepare_matrix_for_cublas).
        return _copied(each for each in factors if not has_rows(each))

    def _begin(self, of: Any, size: int) -> None:
        if of not in self._of_threads:
            self._of_threads[of] = torch.empty(size, dtype=torch.uint8)
            self._label(self._of_threads[of], "workspace", "cuBLAS")


def _copied(tensors: Iterable[Tensor]) -> int:
    return sum(round_up(tensor.nbytes, BLOCK) for tensor in tensors)


_OF_CONTIGUOUS = (
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
)
"""Operators that copy tensors that are not contiguous, such as expanded gradients."""


def _made_contiguous(*args: Any, **_: Any) -> int:
    return _copied(each for each in args if isinstance(each, Tensor) and not each.is_contiguous())


def _index_put(_: Any, indices: Sequence[Any], _values: Any, adds: bool = False, *__: Any) -> int:
    """Sorts the indices to add up values (cuda/Indexing.cu, index_put_with_sort_kernel)."""
    if not adds:
        return 0
    shape = torch.broadcast_shapes(*(each.shape for each in indices if each is not None))  # type: ignore[no-untyped-call]
    return 6 * round_up(8 * prod(shape), BLOCK)


_WORKSPACES: dict[Any, Callable[..., int]] = {
    **REDUCTIONS,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    **{getattr(aten, name).default: _made_contiguous for name in _OF_CONTIGUOUS},
    **dict.fromkeys((aten.index_put.default, aten._index_put_impl.default), _index_put),
}
