"""Isolated trial runs of an op: detached arguments, and a count of the bytes that autograd keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def detached(arguments: Any) -> Any:
    """Returns nested tuples with each tensor replaced by a leaf of the autograd graph with the same values."""
    if isinstance(arguments, Tensor):
        return arguments.detach().requires_grad_(arguments.requires_grad)
    if not isinstance(arguments, tuple):
        return arguments
    parts = [detached(part) for part in arguments]
    return type(arguments)(*parts) if hasattr(arguments, "_fields") else tuple(parts)


@contextmanager
def counting_bytes(tensors: Sequence[Tensor]) -> Iterator[dict[int, int]]:
    """Records the bytes that autograd saves, by storage, without the storages of ``tensors``."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in storages:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
