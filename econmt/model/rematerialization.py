"""Rematerialization: autograd keeps how to make a tensor again instead of the tensor.

After Chen et al. (2016, "Training deep nets with sublinear memory cost"), for a tensor that costs next to nothing to
make, such as looked-up embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Remade:
    """Function that returns a tensor as it was saved for the backward pass."""

    def __init__(self, make: Callable[[], Tensor], saved: Tensor) -> None:
        self._make = make
        self._layout = saved.shape, saved.stride(), saved.storage_offset()

    def __call__(self) -> Tensor:
        with torch.no_grad():
            return self._make().as_strided(*self._layout)


@contextmanager
def rematerialized(tensor: Tensor, make: Callable[[], Tensor]) -> Iterator[None]:
    """Lets operations within the context keep ``make`` instead of ``tensor`` for the backward pass.

    A PyTorch that does not tell which hooks are in force, as 2.7 does not, keeps the tensor.

    Args:
        tensor: Result of ``make``; views of all of it are replaced, too.
        make: Returns the same values in the same order in memory; called once for each operation that kept them.
    """
    hooks_in_force: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if hooks_in_force is None:
        yield
        return
    storage, count = tensor.untyped_storage()._cdata, tensor.numel()
    hooks: Any = hooks_in_force(False) or (_same, _same)
    keep, give = hooks

    def pack(saved: Tensor) -> object:
        if (
            saved.layout is torch.strided
            and saved.untyped_storage()._cdata == storage
            and saved.numel() == count
        ):
            return _Remade(make, saved)
        return keep(saved)

    def unpack(kept: object) -> Tensor:
        made: Tensor = kept() if isinstance(kept, _Remade) else give(kept)
        return made

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _same(value: object) -> object:
    return value
