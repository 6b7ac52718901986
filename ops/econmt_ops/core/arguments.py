"""Arguments of operators whose kernels lie below the operation."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RecurrenceArguments(NamedTuple):
    """Arguments of the linear recurrence operator.

    Attributes:
        decay, inputs: (B, T, H), of one type. initial: (B, H), in the accumulate type, or None.
        lengths: (B,) int64, on the same device, or None.
        reverse: see `econmt_ops.linear_recurrence`.
        stash: "outputs" or "carries", see `econmt_ops.linear_recurrence.scan.STASHES`.
        backend: "chunk", "c" or "triton"; "chunk" also runs where the kernels of the other two cannot.
    """

    decay: Tensor
    inputs: Tensor
    initial: Tensor | None
    lengths: Tensor | None
    reverse: bool
    stash: str
    backend: str = ""


class CrossEntropyArguments(NamedTuple):
    """Arguments of the output layer operator.

    Attributes:
        hidden: (N, H). weight: (V, H). targets: (N,). bias: (V,), or None.
        smoothing, ignore_index, reduction: as in `econmt_ops.linear_cross_entropy`.
        backend: "eager", "compiled" or "triton".
        alone: True if only autograd holds the saved gradients, which then may be scaled in place.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    smoothing: float
    ignore_index: int
    backend: str
    reduction: str
    alone: bool


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
