"""Arguments of operators whose kernels lie below the operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor


class RecurrenceArguments(NamedTuple):
    """Arguments of the linear recurrence operator.

    Attributes:
        decay, inputs: (B, T, H), of one type. initial: (B, H), in the accumulate type, or None.
        lengths: (B,) int64, on the same device, or None.
        reverse: see `econmt_ops.linear_recurrence`.
        backend: "chunk", "c" or "triton"; "chunk" also runs where the kernels of the other two cannot.
    """

    decay: Tensor
    inputs: Tensor
    initial: Tensor | None
    lengths: Tensor | None
    reverse: bool
    backend: str = ""


class CrossEntropyArguments(NamedTuple):
    """Arguments of `econmt_ops.linear_cross_entropy`, checked, with ``hidden`` in the compute type.

    Weight and bias may have another type: they are cast where they are used, so that no copy is saved and their
    gradients are never rounded to the compute type.

    Attributes:
        hidden: (N, H). weight: (V, H). targets: (N,). bias: (V,), or None.
        smoothing, ignore_index, reduction: as in `econmt_ops.linear_cross_entropy`.
        backend: "eager", "compiled" or "triton".
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    smoothing: float
    ignore_index: int
    reduction: str
    backend: str = "eager"


RowGradients = tuple[Tensor, Tensor, Tensor | None]
"""Gradients of an output layer: hidden (N, H), weight (V, H) and, if there is one, bias (V,)."""


class Update(NamedTuple):
    """Arguments of one update: values, their gradient, their moments, and the scalars of the state by name.

    ``salt`` and ``begin`` are arguments of `econmt_ops.optimizers.stochastic_rounding.round_into`. With ``rows`` the
    gradient has these rows alone, in ascending order.
    """

    values: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]
    numbers: dict[str, Tensor]
    salt: int = 0
    begin: int = 0
    rows: Tensor | None = None


class Gathered(Protocol):
    """Result of a collective that is in progress."""

    def wait(self) -> Tensor:
        """Returns the tensors of all ranks, (R, ...), in order of the ranks."""


Gather = Callable[[Tensor], Gathered]
"""Function that starts to collect a tensor, which has the same shape on all ranks."""
