"""Names of the layers that running code belongs to: a stack, whose innermost name counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from econmt_memory.measure import ops_package

_layers: list[str] = []
_watchers: list[Callable[[str], None]] = []


def _share() -> None:
    """Makes this stack and that of econmt_ops one, as soon as the program has imported econmt_ops."""
    global _layers, _watchers
    ops = ops_package.scopes()
    if ops is not None and ops.layers is not _layers:
        ops.layers[:0], ops.watchers[:0] = _layers, _watchers
        _layers, _watchers = ops.layers, ops.watchers


def current_layer() -> str:
    """Returns the innermost layer name, or ``other`` outside of all scopes."""
    _share()
    return _layers[-1] if _layers else "other"


@contextmanager
def watching(callback: Callable[[str], None]) -> Iterator[None]:
    """Calls ``callback`` with the name of the current layer at each change within the context."""
    _share()
    _watchers.append(callback)
    try:
        yield
    finally:
        _watchers.remove(callback)


def enter(name: str) -> None:
    """Enters the scope of a layer; :func:`leave` must follow."""
    _share()
    _layers.append(name)
    _tell()


def leave() -> None:
    """Leaves the innermost scope."""
    _layers.pop()
    _tell()


def _tell() -> None:
    for watcher in _watchers:
        watcher(current_layer())
