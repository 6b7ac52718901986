"""Names of the layers to which running code belongs, so that a memory profiler can attribute feature maps.

``with layer("attention"):`` names the code inside; scopes nest and the innermost counts. A scope costs two list
operations, touches no tensor, and is left out of graphs that torch.compile traces. A profiler reads and changes the
lists and the flag below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

layers: list[str] = []
"""Names of the scopes that have been entered, innermost last."""

watchers: list[Callable[[str], None]] = []
"""Functions that are called with the innermost name at each change."""

are_whole = False
"""True if PyTorch's profiler does not record the operators of which those of econmt_ops consist."""


def current_layer() -> str:
    """Returns the innermost layer name, or ``other`` outside of all scopes."""
    return layers[-1] if layers else "other"


class layer:  # noqa: N801 - read as a statement: with layer("encoder"):
    """Context manager that names the layer of the code inside."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            layers.append(self.name)
            _tell()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not torch.compiler.is_compiling():
            layers.pop()
            _tell()


def _tell() -> None:
    name = current_layer()
    for watcher in watchers:
        watcher(name)


def run_whole(kernel: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Runs an operator, while `are_whole` without recording what it consists of."""
    global are_whole
    if not are_whole:
        return kernel(*arguments)
    are_whole = False  # for operators within this one
    torch._C._autograd._enable_record_function(False)
    try:
        return kernel(*arguments)
    finally:
        torch._C._autograd._enable_record_function(True)
        are_whole = True
