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
