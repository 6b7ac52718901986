"""Facts about operators of econmt_ops, in programs that use it.

econmt_memory and econmt_ops install alone, so neither imports the other. This module alone knows names of econmt_ops,
and looks for them among the modules that the program has imported. Without econmt_ops it tells nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from econmt_memory.measure.patches import patched


def scopes() -> Any:
    """Returns the module with the layers that operators of econmt_ops enter; None if the program does not use it."""
    return sys.modules.get("econmt_ops.core.scopes")


def cost_of(operator: str) -> Callable[..., tuple[int, int]] | None:
    """Returns the function that computes an operator's internal bytes and its operations; None if none is declared."""
    traits = sys.modules.get("econmt_ops.dispatch.traits")
    return None if traits is None else traits.cost_of(operator)


def following_rules(device: str) -> AbstractContextManager[None]:
    """Makes operators choose, within the context, the implementation that a type of device has without measuring."""
    rule = sys.modules.get("econmt_ops.dispatch.rule")
    return nullcontext() if rule is None else rule.rules_only(device)


def whole_operators() -> AbstractContextManager[None]:
    """Keeps PyTorch's profiler, within the context, from recording what operators of econmt_ops consist of."""
    ops = scopes()
    return nullcontext() if ops is None else patched(ops, are_whole=True)
