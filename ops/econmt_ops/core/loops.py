"""Loops over identical steps, of which a memory estimate need not run all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Repeating = Callable[[int], AbstractContextManager[object]]
"""Context manager factory: called with the number of skipped steps that the step inside the context represents."""

_FIRST = 3
"""Steps run at the beginning of a shortened loop: the first starts from another state, the second from the first one's
results, and from the third on all are alike."""

_repeating: list[Repeating] = []


@contextmanager
def shortened(repeating: Repeating) -> Iterator[None]:
    """Runs only the first steps and the last one of every loop over steps, for tensors whose values are not needed.

    Args:
        repeating: Context of the step that represents the skipped ones.
    """
    _repeating.append(repeating)
    try:
        yield
    finally:
        _repeating.pop()


def steps_of(order: range) -> Iterator[int]:
    """Yields the steps of a loop in order; each must run the same operators on the same shapes as the others."""
    left_out = len(order) - _FIRST - 1
    if not _repeating or left_out < 1:
        yield from order
        return
    yield from order[: _FIRST - 1]
    with _repeating[-1](left_out):
        yield order[_FIRST - 1]
    yield order[-1]
