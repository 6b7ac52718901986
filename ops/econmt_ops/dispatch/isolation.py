"""A trial of an op: on arguments that are cut off from what made them, with the bytes counted that autograd keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def detached(arguments: Any) -> Any:
    """The same nested tuples with leaves of the graph instead of tensors that were computed."""
    if isinstance(arguments, Tensor):
        return arguments.detach().requires_grad_(arguments.requires_grad)
    if not isinstance(arguments, tuple):
        return arguments
    parts = [detached(part) for part in arguments]
    return type(arguments)(*parts) if hasattr(arguments, "_fields") else tuple(parts)


@contextmanager
def counting_bytes(tensors: Sequence[Tensor]) -> Iterator[dict[int, int]]:
    """The bytes that autograd keeps, each storage once, without those of ``tensors``."""
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
