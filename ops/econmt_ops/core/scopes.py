"""Names of the layers to which running code belongs, so that a memory profiler can attribute feature maps.

``with layer("attention"):`` names the code inside; scopes nest and the innermost counts. A scope costs two list
operations, touches no tensor, and is left out of graphs that torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

_scopes: list[str] = []
_watchers: list[Callable[[str], None]] = []
_are_whole = False


def current_layer() -> str:
    """Returns the innermost layer name, or ``other`` outside of all scopes."""
    return _scopes[-1] if _scopes else "other"


@contextmanager
def watching(callback: Callable[[str], None]) -> Iterator[None]:
    """Calls ``callback`` with the name of the current layer at each change within the context."""
    _watchers.append(callback)
    try:
        yield
    finally:
        _watchers.remove(callback)


class layer:  # noqa: N801 - read as a statement: with layer("encoder"):
    """Context manager that names the layer of the code inside."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            enter(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not torch.compiler.is_compiling():
            leave()


@contextmanager
def whole_operators() -> Iterator[None]:
    """Keeps PyTorch's profiler, within the context, from recording the operators that those of econmt consist of."""
    global _are_whole
    before, _are_whole = _are_whole, True
    try:
        yield
    finally:
        _are_whole = before


def run_whole(kernel: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Runs an operator of econmt, within :func:`whole_operators` without recording what it consists of."""
    global _are_whole
    if not _are_whole:
        return kernel(*arguments)
    _are_whole = False  # for operators within this one
    torch._C._autograd._enable_record_function(False)
    try:
        return kernel(*arguments)
    finally:
        torch._C._autograd._enable_record_function(True)
        _are_whole = True


def enter(name: str) -> None:
    """Enters the scope of a layer; :func:`leave` must follow."""
    _scopes.append(name)
    for watcher in _watchers:
        watcher(name)


def leave() -> None:
    """Leaves the innermost scope."""
    _scopes.pop()
    name = current_layer()
    for watcher in _watchers:
        watcher(name)
