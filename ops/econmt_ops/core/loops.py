"""Loops over steps that all do the same, which who follows the memory of a call need not see all of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Repeating = Callable[[int], AbstractContextManager[object]]
"""Given how many more steps are like the one inside its context, which stands for them."""

_FIRST = 3
"""Steps that are run at the beginning of a loop: the first finds another state than the others, the second what the
first has left, and from the third on all are alike."""

_repeating: list[Repeating] = []


@contextmanager
def shortened(repeating: Repeating) -> Iterator[None]:
    """Inside, loops over steps run their first ones and the last one, for tensors whose values nobody asks for.

    Args:
        repeating: told of the step that stands for those left out.
    """
    _repeating.append(repeating)
    try:
        yield
    finally:
        _repeating.pop()


def steps_of(order: range) -> Iterator[int]:
    """The steps of a loop in their order; each runs the same operators on the same shapes as the others."""
    left_out = len(order) - _FIRST - 1
    if not _repeating or left_out < 1:
        yield from order
        return
    yield from order[: _FIRST - 1]
    with _repeating[-1](left_out):
        yield order[_FIRST - 1]
    yield order[-1]
