"""Which layer the running code belongs to, so that a ledger can say whose feature maps it sees.

``with layer("attention"):`` names the code inside; scopes nest and the innermost wins. It costs two list
operations, touches no tensor, and is left out of a graph that torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

_scopes: list[str] = []
_watchers: list[Callable[[str], None]] = []


def current_layer() -> str:
    """The innermost layer name, or ``other`` outside of all scopes."""
    return _scopes[-1] if _scopes else "other"


@contextmanager
def watching(callback: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``callback`` is called with the layer that has become the current one, at each change."""
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
            _scopes.append(self.name)
            _tell()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not torch.compiler.is_compiling():
            _scopes.pop()
            _tell()


def _tell() -> None:
    for watcher in _watchers:
        watcher(current_layer())
