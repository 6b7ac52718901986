"""Guided alignment: attention trained towards word alignments (Chen et al., 2016, "Guided Alignment Training").

The loss of a target token is the cross-entropy between its attention and the uniform distribution over the source
tokens that it is aligned to; tokens without alignment, such as the end of a sentence, have none.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from econmt_ops.core.precision import accumulate_dtype

_EPSILON = 1e-6
"""Added to attention before its logarithm, so that attention of zero has a finite loss."""


class TrainingGuides(NamedTuple):
    """Guides of the loss of a batch.

    Attributes:
        alignment: 1 where tokens are aligned, else 0, (B, T, S) int64; None: no alignment loss.
        alignment_weight: factor of the alignment loss.
        weights: factors of the losses of each pair, (B,) float32; None: 1.
    """

    alignment: Tensor | None = None
    alignment_weight: float = 1.0
    weights: Tensor | None = None


def alignment_losses(attention: Tensor, alignment: Tensor) -> Tensor:
    """Computes the alignment loss of each pair, summed over its target tokens, (B,).

    Args:
        attention: (B, T, S). alignment: 1 where tokens are aligned, else 0, (B, T, S) int64.
    """
    logs = (attention.to(accumulate_dtype(attention.dtype)) + _EPSILON).log()
    linked = alignment.to(logs.dtype)
    each = (logs * linked).sum(2) / linked.sum(2).clamp(min=1.0)
    return -each.sum(1)
