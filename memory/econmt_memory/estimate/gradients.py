"""Gradients that autograd computes in place for plain tensors, but not for fake ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _computes_gradients() -> bool:
    """Returns True if a backward pass runs that is not differentiated itself."""
    return torch._C._current_graph_task_id() >= 0 and not torch.is_grad_enabled()


class Accumulation:
    """Replaces the addition of tensors, so that a backward pass adds up gradients in place.

    It writes to one of two gradients to which nothing else in C++ refers (torch/csrc/autograd/input_buffer.cpp,
    can_accumulate_inplace), which has as many references as the first one that it sees.
    """

    def __init__(self) -> None:
        self._unshared: tuple[int, ...] | None = None

    def __call__(self, left: Tensor, right: Any, **_: Any) -> Any:
        """Returns the sum, or NotImplemented if PyTorch makes a new tensor for it."""
        if not isinstance(right, Tensor) or not _computes_gradients() or left.shape != right.shape:
            return _add_sparse(left, right)
        for each in (left, right):
            storage = each.untyped_storage()
            # Those of Python differ between its versions, and a program that keeps gradients itself is rare.
            references = each._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
            self._unshared = self._unshared or references
            if references == self._unshared and each.nbytes == storage.nbytes():  # dense
                return each
        return NotImplemented


def accumulate_once() -> None:
    """Lets a backward pass add up two gradients to which nothing else refers."""
    values = torch.zeros(1, requires_grad=True)
    (values.sin() + values.cos()).sum().backward()  # type: ignore[no-untyped-call]


def _add_sparse(left: Tensor, right: Tensor | float, *, in_place: bool = False, **_: Any) -> Any:
    """Adds a sparse gradient to a dense one, which fake tensors do not support."""
    if not isinstance(right, Tensor) or not right.is_sparse or left.is_sparse:
        return NotImplemented
    return left if in_place else torch.empty_like(left)


IN_PLACE: dict[Any, Any] = {
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten._index_put_impl.default: aten._index_put_impl_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
}
"""Operators that write gradients to new zeros, for plain tensors in place (FunctionsManual.cpp)."""
_OUT_OF_PLACE = ("ScatterReduce", "IndexPut")
"""Nodes of autograd that call one of them out of place in any case."""


def _into_zeros(zeros: Tensor, *_: Any, **__: Any) -> Any:
    node = torch._C._current_autograd_node()
    is_in_place = _computes_gradients() and node is not None and not node.name().startswith(_OUT_OF_PLACE)
    return zeros if is_in_place else NotImplemented


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(IN_PLACE, _into_zeros),
    aten.add.Tensor: _add_sparse,
    aten.add_.Tensor: partial(_add_sparse, in_place=True),
}
"""Replacements by operator."""
