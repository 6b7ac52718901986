"""Output layer and cross entropy in plain PyTorch: the definition that the other implementations are tested against."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.traits import Traits

TRAITS = Traits()
"""Plain PyTorch under autograd."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """Implements `econmt_ops.linear_cross_entropy` for checked arguments and a cast ``hidden``."""
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    logits = functional.linear(hidden, weight, bias).to(accumulate_dtype(hidden.dtype))
    return functional.cross_entropy(
        logits, targets, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
