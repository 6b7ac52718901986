"""Fake tensors in place of a device's, and replacements for operators that fake tensors cannot run.

Fake tensors have shapes and no values. So operators that read values, or whose memory only a library knows, are
replaced by functions that allocate as much.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from econmt_memory.estimate import gpu_replacements, gradients, sequences
from econmt_memory.estimate.cpu_workspaces import onednn_lstm
from econmt_memory.estimate.gpu_dispatch import as_on_gpu, standing_in
from econmt_memory.measure.ops_package import following_rules
from econmt_memory.measure.patches import patched

aten = torch.ops.aten


def scalar_of(value: Tensor) -> Any:
    """Replaces reading values: conditions are true, and a program may divide by x and, for a float, by 1 - x.

    Integers may be known (:mod:`econmt_memory.estimate.sequences`).
    """
    known = sequences.known_values(value)
    return (0.5 if value.is_floating_point() else 1) if known is None else known


def elements_not_zero(share: float, tensor: Tensor) -> Tensor:
    """Assumes that a share of the values is not zero."""
    return tensor.new_empty((round(share * tensor.numel()), tensor.dim()), dtype=torch.int64)


def _index(tensor: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Looks for the elements of masks as on a device, where each mask becomes one index for each dimension."""
    expanded: list[Tensor | None] = []
    has_masks = False
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        has_masks |= is_mask
        expanded += index.nonzero().unbind(1) if is_mask else [index]  # type: ignore[union-attr]
    return aten.index.Tensor(tensor, expanded) if has_masks else NotImplemented


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    return tensor.new_empty(len(mask.expand(shape).reshape(-1).nonzero()))


def _distinct(
    most: Callable[[int], int],
    values: Tensor,
    _sorted: bool = True,
    inverse: bool = False,
    counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Assumes that ``unique`` finds ``most(n)`` distinct values among n."""
    distinct = values.new_empty(most(values.numel()))
    indices = values.new_empty(values.shape if inverse else 0)
    return distinct, indices, values.new_empty(len(distinct) if counts else 0)


def _consecutive(values: Tensor, inverse: bool = False, counts: bool = False, _dim: int | None = None) -> Any:
    """Assumes that no two neighbours are equal."""
    return _distinct(int, values, True, inverse, counts)


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Compares storages and shapes, without creating them as PyTorch does."""
    storages = tensor.untyped_storage()._cdata, other.untyped_storage()._cdata
    return storages[0] == storages[1] and all(
        getattr(tensor, name)() == getattr(other, name)() for name in ("storage_offset", "size", "stride")
    )


def _bincount(values: Tensor, _weights: Tensor | None = None, least: int = 0) -> Tensor:
    """Assumes that no value exceeds the least number of bins."""
    return values.new_empty(least)


def _split(tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    """Splits a tensor; into equal parts if the sizes do not add up, since they came from values of a tensor."""
    if sum(sizes) != tensor.shape[dim]:
        return list(torch.tensor_split(tensor, len(sizes), dim))
    return list(torch.tensor_split(tensor, list(accumulate(sizes))[:-1], dim))


def _grouped_product(left: Tensor, right: Tensor, ends: Tensor | None = None, *_: Any, **__: Any) -> Any:
    """Multiplies groups of rows or columns, which fake tensors do in bfloat16 alone."""
    if left.dtype == torch.bfloat16:
        return NotImplemented
    groups = left.shape[:-2] if left.dim() == right.dim() else ()
    if ends is not None and left.dim() == right.dim() == 2:
        groups = ends.shape
    return left.new_empty(*groups, left.shape[-2], right.shape[-1])


REPLACEMENTS: dict[OpOverload[..., Any], Callable[..., Any]] = {
    aten._local_scalar_dense.default: scalar_of,
    aten.is_set_to.default: _is_same,
    aten.nonzero.default: partial(elements_not_zero, 1.0),
    aten.index.Tensor: _index,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: partial(_distinct, int),
    **gradients.REPLACEMENTS,
    aten.unique_consecutive.default: _consecutive,
    aten.bincount.default: _bincount,
    aten.split_with_sizes.default: _split,
    aten.mkldnn_rnn_layer.default: onednn_lstm,
    **sequences.REPLACEMENTS,
}
"""Replacements by operator; a replacement takes the operator's arguments and returns results of the right shapes."""


if hasattr(aten, "_grouped_mm"):
    REPLACEMENTS[aten._grouped_mm.default] = _grouped_product


def _add_to_sum(_total: Tensor, _left: Tensor, _right: Tensor, _dtype: torch.dtype, **options: Any) -> Tensor:
    """Adds a product of 16-bit factors to a float32 sum, which fake tensors of torch 2.11 do not support."""
    out: Tensor = options["out"]
    return out


ON_GPU = {**REPLACEMENTS, **gpu_replacements.REPLACEMENTS}
"""Replacements for a fake GPU."""

if hasattr(aten.addmm, "dtype_out"):  # torch 2.8 and newer
    ON_GPU[aten.addmm.dtype_out] = _add_to_sum


def assuming_distinct(most: Callable[[int], int]) -> dict[OpOverload[..., Any], Callable[..., Any]]:
    """Returns the replacements for a CPU, where ``unique`` finds at most ``most(n)`` distinct values among n."""
    return {**REPLACEMENTS, aten._unique2.default: partial(_distinct, lambda count: max(1, most(count)))}


@contextmanager
def fake_tensors(device: str) -> Iterator[FakeTensorMode]:
    """Makes new tensors fake CPU tensors that stand for those of ``device``, "cpu" or "cuda"."""
    with ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(following_rules(device))
        if device == "cuda":
            stack.enter_context(as_on_gpu())
            stack.enter_context(_without_launches())
        else:
            stack.enter_context(standing_in(sequences.STAND_INS))
        yield mode


@contextmanager
def _without_launches() -> Iterator[None]:
    """Makes launches of Triton kernels do nothing, so that the code around them runs on fake tensors."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    compiled = importlib.import_module("triton.runtime.jit").JITFunction
    interpreted = importlib.import_module("triton.runtime.interpreter").GridExecutor

    def ignore(*_: Any, **__: Any) -> None:
        """Launches nothing."""

    with patched(compiled, run=ignore), patched(interpreted, __call__=ignore):
        yield
