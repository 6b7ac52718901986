"""Memory that PyTorch's own operators use internally on this CPU.

Libraries such as oneDNN reorder tensors into layouts that depend on the processor. So the prediction of a step on the
CPU runs each such operator once for each shape, on zeros, and reads what the allocator gave out.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from econmt_memory.estimate.gradients import IN_PLACE
from econmt_memory.measure.allocations import recorded
from econmt_memory.measure.profiled_operators import read_events
from econmt_memory.measure.ram import free_ram

aten = torch.ops.aten

PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
"""Matrix products."""
_NEVER = (aten.copy_, aten._to_copy, aten.cat, aten.zero_, aten.fill_, aten._local_scalar_dense, aten.resize_)
"""Operators that only write their results."""

_KNOWN: dict[Any, tuple[int, list[Tensor]]] = {}
"""Internal bytes and results without memory, by operator and arguments, shared by all predictions of the process."""


def onednn_lstm(*args: Any) -> tuple[Tensor, ...]:
    """Makes results of the sizes that oneDNN chooses, since it keeps what it likes for the backward pass."""
    found = _measured(aten.mkldnn_rnn_layer.default, args, {})[1]
    made = [args[0].new_empty(each.shape, dtype=each.dtype) for each in found]
    if len(made) == 3:  # without a backward pass nothing is kept
        made.append(args[0].new_empty(0, dtype=torch.uint8))
    return tuple(made) or NotImplemented


def cpu_workspace(func: Any) -> Callable[..., int] | None:
    """Returns a function that gives the internal bytes of an operator for its arguments; None if it needs none."""
    packet = getattr(func, "overloadpacket", None)
    is_list = func.name().startswith(("aten::_foreach", "aten::_fused"))
    # Results for zeros would have other sizes.
    is_dynamic = torch.Tag.dynamic_output_shape in func.tags and packet is not aten.masked_select
    if func.namespace != "aten" or is_list or packet in _NEVER or is_dynamic:
        return None

    def workspace(*args: Any, **kwargs: Any) -> int:
        tensors = [tensor for tensor in _tensors(args) if tensor.dim()]
        if packet in PRODUCTS:  # reorder factors of 16 bits, and those without neighbouring elements
            allocates = any(tensor.element_size() == 2 or not has_rows(tensor) for tensor in tensors)
        elif torch.Tag.pointwise in func.tags:
            # Convert integers and tensors of several types, or make them dense.
            types = {tensor.dtype for tensor in tensors}
            plain = len(types) <= 1 and all(each.is_floating_point or each.is_complex for each in types)
            allocates = not plain or not all(tensor.is_contiguous() for tensor in tensors)
        else:
            allocates = True
        return _measured(func, args, kwargs)[0] if allocates else 0

    return workspace


def has_rows(factor: Tensor) -> bool:
    """Returns True if rows or columns of one or several matrices have neighbouring elements and do not overlap."""
    sizes, strides = factor.shape[-2:], factor.stride()[-2:]
    return factor.dim() < 2 or any(strides[i] == 1 and strides[1 - i] >= max(1, sizes[i]) for i in (0, 1))


def _measured(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, list[Tensor]]:
    """Returns the internal bytes at the operator's peak, beyond those of its results, and the results.

    They are 0 and none if memory is too small.
    """
    key = func, _described((args, tuple(kwargs.items())))
    if key not in _KNOWN:
        needed = 4 * sum(tensor.numel() * tensor.element_size() for tensor in _tensors((args, kwargs)))
        _KNOWN[key] = _run(func, args, kwargs) if needed < free_ram() else (0, [])
    return _KNOWN[key]


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, list[Tensor]]:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.random.fork_rng(devices=[]):
        real_args, real_kwargs = tree_map(_zeros, (args, kwargs))
        try:
            with recorded() as found:
                results = IN_PLACE.get(func, func)(*real_args, **real_kwargs)
        except (RuntimeError, ZeroDivisionError, IndexError):  # zeros are no lengths, and divide nothing
            return 0, []
        sizes = [event.size for each in found for event in read_events(each, torch.device("cpu"))[1]]
        forms = [torch.empty_like(each, device="meta") for each in _tensors(results)]
        del results
    return max(accumulate(sizes), default=0) - sum(sizes), forms


def _zeros(value: Any) -> Any:
    """Returns zeros in place of a fake tensor, or a mask that is true."""
    if not isinstance(value, Tensor):
        return value
    plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    plain.untyped_storage().fill_(1 if value.dtype is torch.bool else 0)  # type: ignore[attr-defined]
    return plain


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(map(_described, value)) if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
