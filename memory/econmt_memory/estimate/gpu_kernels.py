"""Memory of PyTorch's operators on a GPU, where it differs from what fake tensors show.

Each rule names the file of PyTorch 2.11, below aten/src/ATen/native, that allocates the memory. Replacements allocate
an operator's results and the workspaces that it frees; :class:`Workspaces` gives the bytes that other operators need
beyond their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from econmt_memory.estimate.allocator import cublas_workspace, round_up
from econmt_memory.estimate.cpu_workspaces import has_rows
from econmt_memory.estimate.gpu_attention import ATTENTION
from econmt_memory.estimate.gpu_convolutions import CONVOLUTIONS
from econmt_memory.estimate.gpu_recurrent import RECURRENT
from econmt_memory.estimate.gpu_reductions import REDUCTIONS
from econmt_memory.measure.storages import BLOCK

aten = torch.ops.aten


def _layer_norm(inputs: Tensor, shape: Sequence[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Keeps mean and deviation in float32 (cuda/layer_norm_kernel.cu, layer_norm_cuda)."""
    return normalized(inputs, shape, _accumulated(inputs))


def normalized(inputs: Tensor, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the results of a layer normalization, whose mean and deviation have a type."""
    outer = inputs.shape[: inputs.dim() - len(shape)] + (1,) * len(shape)
    outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    mean, deviation = (inputs.new_empty(outer, dtype=dtype) for _ in range(2))
    return outputs, mean, deviation


def _accumulated(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _cudnn_batch_norm(
    inputs: Tensor, weight: Tensor, _bias: Tensor, _mean: Any, _variance: Any, training: bool, *_: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keeps mean and deviation of each channel (cudnn/BatchNorm.cpp)."""
    kept = weight.numel() if training else 0
    outputs = torch.empty_like(inputs)
    saved = [weight.new_empty(kept) for _ in range(2)]
    return outputs, saved[0], saved[1], inputs.new_empty(0, dtype=torch.uint8)


def _cudnn_batch_norm_backward(
    inputs: Tensor, gradient: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    gradient = gradient.contiguous(memory_format=suggest_memory_format(inputs))
    return torch.empty_like(inputs), torch.empty_like(weight), torch.empty_like(weight)


_SORTED_FROM = 3072
"""Most indices whose gradients are added up without sorting them (cuda/Embedding.cu)."""
_ROWS_OF_THREAD = 10
"""Gradients that a thread adds up (cuda/EmbeddingBackwardKernel.cu)."""


def _embedding_backward(gradient: Tensor, indices: Tensor, rows: int, *_: Any) -> Tensor:
    """Adds up gradients, of many indices by sorting them (cuda/EmbeddingBackwardKernel.cu)."""
    gradient, indices = gradient.contiguous(), indices.contiguous()
    count, width = indices.numel(), gradient.shape[-1]
    if count <= _SORTED_FROM:
        return gradient.new_empty(rows, width)
    kept = [torch.empty_like(indices) for _ in range(2)]
    numbers = torch.empty_like(indices)
    scratch = [torch.empty_like(indices) for _ in range(2)]  # of the radix sort
    del numbers, scratch
    result = gradient.new_empty(rows, width)
    segments = min(count, rows)
    partial = count // _ROWS_OF_THREAD + segments
    kept += [indices.new_empty(size) for size in (count, segments, segments, partial)]
    sums = gradient.new_empty(partial, width, dtype=_accumulated(gradient))
    del kept, sums
    return result


def _group_norm(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a scale and a shift for each channel of each row (cuda/group_norm_kernel.cu)."""
    rows, channels, _, groups, _ = sizes
    outputs = torch.empty_like(inputs)
    statistics = [inputs.new_empty(rows, groups) for _ in range(2)]
    if weight is not None or bias is not None:
        scratch = [inputs.new_empty(rows, channels, dtype=_accumulated(inputs)) for _ in range(2)]
        del scratch
    return outputs, statistics[0], statistics[1]


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **ATTENTION,
    **RECURRENT,
    aten.native_layer_norm.default: _layer_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.embedding_dense_backward.default: _embedding_backward,
}
"""Replacements by operator."""


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
        return _copies(each for each in factors if not has_rows(each))

    def _begin(self, of: Any, size: int) -> None:
        if of not in self._of_threads:
            self._of_threads[of] = torch.empty(size, dtype=torch.uint8)
            self._label(self._of_threads[of], "workspace", "cuBLAS")


def _copies(tensors: Iterable[Tensor]) -> int:
    return sum(round_up(tensor.nbytes, BLOCK) for tensor in tensors)


_OF_CONTIGUOUS = (
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
)
"""Operators that copy tensors that are not contiguous, such as expanded gradients."""


def _made_contiguous(*args: Any, **_: Any) -> int:
    return _copies(each for each in args if isinstance(each, Tensor) and not each.is_contiguous())


def _index_put(_: Any, indices: Sequence[Any], _values: Any, adds: bool = False, *__: Any) -> int:
    """Sorts the indices to add up values (cuda/Indexing.cu, index_put_with_sort_kernel)."""
    if not adds:
        return 0
    shape = torch.broadcast_shapes(*(each.shape for each in indices if each is not None))  # type: ignore[no-untyped-call]
    return 6 * round_up(8 * prod(shape), BLOCK)


_WORKSPACES: dict[Any, Callable[..., int]] = {
    **REDUCTIONS,
    **CONVOLUTIONS,
    **{getattr(aten, name).default: _made_contiguous for name in _OF_CONTIGUOUS},
    **dict.fromkeys((aten.index_put.default, aten._index_put_impl.default), _index_put),
}
