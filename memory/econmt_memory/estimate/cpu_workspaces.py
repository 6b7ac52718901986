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

from econmt_memory.measure.allocations import recorded
from econmt_memory.measure.profiled_operators import read_events
from econmt_memory.measure.ram import free_ram

aten = torch.ops.aten

_ALWAYS = (
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.mkldnn_rnn_layer.default,
    aten.mkldnn_rnn_layer_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten.native_batch_norm_backward.default,
    aten.embedding_dense_backward.default,
)
_IN_16_BITS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
"""Matrix products, which reorder their factors if these have 16 bits."""

_KNOWN: dict[Any, int] = {}
"""Internal bytes by operator and arguments, shared by all predictions of the process."""


def cpu_workspace(func: Any) -> Callable[..., int] | None:
    """Returns a function that gives the internal bytes of an operator for its arguments; None if it needs none."""
    if func in _ALWAYS:
        return lambda *args, **kwargs: _measured(func, args, kwargs)
    if func in _IN_16_BITS:
        return lambda *args, **kwargs: _measured(func, args, kwargs) if args[0].element_size() == 2 else 0
    if torch.Tag.pointwise in func.tags:
        return lambda *args, **kwargs: _measured(func, args, kwargs) if _is_mixed(args) else 0
    return None


def _is_mixed(args: tuple[Any, ...]) -> bool:
    """Returns True if tensors have several types, or integers, so that an operator may convert them first."""
    types = {tensor.dtype for tensor in _tensors(args) if tensor.dim()}
    return len(types) > 1 or not all(each.is_floating_point or each.is_complex for each in types)


def _measured(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the internal bytes at the operator's peak, beyond those of its results; 0 if memory is too small."""
    key = func, _described((args, tuple(kwargs.items())))
    if key not in _KNOWN:
        needed = 4 * sum(tensor.numel() * tensor.element_size() for tensor in _tensors((args, kwargs)))
        _KNOWN[key] = _run(func, args, kwargs) if needed < free_ram() else 0
    return _KNOWN[key]


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.random.fork_rng(devices=[]):
        real_args, real_kwargs = tree_map(_zeros, (args, kwargs))
        try:
            with recorded() as found:
                results = func(*real_args, **real_kwargs)
        except (RuntimeError, ZeroDivisionError):  # integers divided by zeros
            return 0
        sizes = [event.size for each in found for event in read_events(each, torch.device("cpu"))[1]]
        del results
    return max(accumulate(sizes), default=0) - sum(sizes)


def _zeros(value: Any) -> Any:
    """Returns zeros in place of a fake tensor."""
    if not isinstance(value, Tensor):
        return value
    plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    plain.untyped_storage().fill_(0)  # type: ignore[attr-defined]
    return plain


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(map(_described, value)) if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
