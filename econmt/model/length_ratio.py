"""Auxiliary task of predicting the length of a translation from the encoder's outputs, as in Sockeye.

Shapes: B sentences, E encoder size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from econmt.config import recipe
from econmt.model.layers import initialize_linear

_LEAST = 1e-6
"""Lower bound of predicted lengths in tokens, before their logarithm is taken."""


class LengthRatio(nn.Module):
    """Small network over the mean of a sentence's encoder outputs (E,), with tanh between its layers.

    It always computes in float32, because lengths must be exact to a token.
    """

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(size, size) for _ in range(layers - 1))
        self.output = nn.Linear(size, 1)

    def initialize(self, init: recipe.Initialization) -> None:
        """Draws initial values of all parameters."""
        for part in (*self.hidden, self.output):
            assert isinstance(part, nn.Linear)
            initialize_linear(part, init)

    def forward(self, mean: Tensor) -> Tensor:
        """Predicts the ratio of target to source length (B,), both including EOS, from ``mean`` (B, E)."""
        with torch.autocast(mean.device.type, enabled=False):
            hidden = mean.to(self.output.weight.dtype)
            for part in self.hidden:
                hidden = torch.tanh(part(hidden))
            ratios: Tensor = nn.functional.softplus(self.output(hidden))
        return ratios[:, 0]


def length_loss(
    task: Literal["ratio", "length"], ratios: Tensor, source_lengths: Tensor, target_lengths: Tensor
) -> Tensor:
    """Computes the loss of predicted lengths, a scalar: each sentence's loss times its number of target tokens, summed.

    It is therefore summed over batches and ranks, and divided, like the cross-entropy. ratio: squared error of the
    ratio. length: half the Poisson deviance of the length, which is Sockeye's loss minus its minimum.

    Args:
        ratios: predictions, (B,). source_lengths, target_lengths: lengths including EOS, (B,); sentences without target
            tokens do not contribute.
    """
    sources, targets = source_lengths.to(ratios.dtype), target_lengths.to(ratios.dtype)
    if task == "ratio":
        each = (ratios - targets / sources).square()
    else:
        expected = (ratios * sources).clamp(min=_LEAST)
        each = expected - targets + torch.xlogy(targets, targets) - targets * expected.log()
    return (each * targets).sum()
