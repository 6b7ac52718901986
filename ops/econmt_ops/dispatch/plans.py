"""Plans of calls: decided and checked once for calls with the same shapes and types, then looked up."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

_MOST = 4096
"""Plans that are kept at a time."""

Plan = TypeVar("Plan")


class Plans(dict[Hashable, Plan]):
    """Plans of an op by what they depend on; all are forgotten when a measurement or an implementation changes."""

    _all: list[Plans[Any]] = []  # noqa: RUF012  of all ops

    def __init__(self) -> None:
        super().__init__()
        Plans._all.append(self)

    def add(self, key: Hashable | None, plan: Plan) -> None:
        """Adds the plan of a call, unless it has no key."""
        if key is None:
            return
        if len(self) >= _MOST:
            self.clear()
        self[key] = plan


def forget_plans() -> None:
    """Forgets the plans of all ops, after something changed on which choices depend."""
    for plans in Plans._all:
        plans.clear()
