"""Prediction of a translation's length from the encoder's outputs: an auxiliary task, as in Sockeye.

Shapes: B sentences, E encoder size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from econmt.config import recipe
from econmt.model.layers import initialize_linear

_LEAST = 1e-6
"""Target tokens that a sentence is at least expected to have, of which a logarithm is taken."""


class LengthRatio(nn.Module):
    """A small network over the mean of a sentence's encoder outputs.

    Its products are in float32, whatever the precision of others: a length has to be right to a token.

    Args:
        size: E. layers: how many, tanh between them.
    """

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(size, size) for _ in range(layers - 1))
        self.output = nn.Linear(size, 1)

    def initialize(self, init: recipe.Initialization) -> None:
        """Draw first values of all parameters."""
        for part in (*self.hidden, self.output):
            assert isinstance(part, nn.Linear)
            initialize_linear(part, init)

    def forward(self, mean: Tensor) -> Tensor:
        """Target tokens for each source token (B,), both ends of sentences counted, from ``mean`` (B, E)."""
        with torch.autocast(mean.device.type, enabled=False):
            found = mean.to(self.output.weight.dtype)
            for part in self.hidden:
                found = torch.tanh(part(found))
            ratios: Tensor = nn.functional.softplus(self.output(found))
        return ratios[:, 0]


def length_loss(
    task: Literal["ratio", "length"], ratios: Tensor, source_lengths: Tensor, target_lengths: Tensor
) -> Tensor:
    """Computes the loss of predicted lengths: a scalar, summed over target tokens, each with its sentence's loss.

    So it is added up over batches and ranks, and divided, as the cross-entropy is. ratio: the squared error of the
    ratio. length: half the Poisson deviance of the length, which is Sockeye's loss less the least that it can be.

    Args:
        ratios: (B,) what is expected. source_lengths, target_lengths: (B,), ends of sentences counted; a sentence
            without target tokens does not count.
    """
    sources, targets = source_lengths.to(ratios.dtype), target_lengths.to(ratios.dtype)
    if task == "ratio":
        each = (ratios - targets / sources).square()
    else:
        expected = (ratios * sources).clamp(min=_LEAST)
        each = expected - targets + torch.xlogy(targets, targets) - targets * expected.log()
    return (each * targets).sum()
