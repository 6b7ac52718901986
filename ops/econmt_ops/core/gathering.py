"""How a tensor of every rank is asked for; econmt_ops itself knows no ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Gathered(Protocol):
    """The same tensor of every rank, on its way."""

    def wait(self) -> Tensor:
        """All of them (R, ...), in order of the ranks."""


Gather = Callable[[Tensor], Gathered]
"""Begins to exchange a tensor, of the same shape on all ranks."""
