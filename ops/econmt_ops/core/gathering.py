"""Interface for collecting a tensor from all ranks; the implementation belongs to the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Gathered(Protocol):
    """Result of a collective that is in progress."""

    def wait(self) -> Tensor:
        """Returns the tensors of all ranks, (R, ...), in order of the ranks."""


Gather = Callable[[Tensor], Gathered]
"""Function that starts to collect a tensor, which has the same shape on all ranks."""
