"""Plans of calls: decided and checked once for calls with the same shapes and types, then looked up."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_MOST = 4096
"""Plans that are kept at a time."""

Plan = TypeVar("Plan")


class Plans(Generic[Plan]):
    """Plans of an op by what they depend on; all are forgotten when a measurement or an implementation changes."""

    _all: list[Plans[object]] = []  # noqa: RUF012  of all ops

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}
        Plans._all.append(self)  # type: ignore[arg-type]

    def get(self, key: Hashable | None) -> Plan | None:
        """Returns the plan of a call, or None if there is none yet or the call has no key."""
        return None if key is None else self._plans.get(key)

    def add(self, key: Hashable | None, plan: Plan) -> None:
        """Adds the plan of a call, unless it has no key."""
        if key is None:
            return
        if len(self._plans) >= _MOST:
            self._plans.clear()
        self._plans[key] = plan

    def __len__(self) -> int:
        return len(self._plans)

    def clear(self) -> None:
        """Forgets all plans."""
        self._plans.clear()


def forget_plans() -> None:
    """Forgets the plans of all ops, after something changed on which choices depend."""
    for plans in Plans._all:
        plans.clear()
