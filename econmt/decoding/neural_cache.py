"""Neural cache of a language model: recent words become more probable (Grave, Joulin and Usunier 2017, 1612.04426).

With h_t the input of the output layer at position t, and x_{t+1} the token that follows, the model's distribution p is
mixed with that of the last n positions:

    (1 - lambda) p(w) + lambda sum_i 1[x_{i+1} = w] exp(theta h_t . h_i) / sum_i exp(theta h_t . h_i)

The first token of a text has no cache and the model's probability.

Shapes: N tokens, M positions in the cache, D width of the output layer's input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from econmt.config import limits
from econmt.errors import InputError

_VALUES = 1 << 22
"""Number of scores computed at once."""


@dataclass(frozen=True)
class NeuralCache:
    """Settings of a neural cache; the defaults are those of AWD-LSTM on WikiText-2 (Merity et al., 2018).

    Args:
        size: n, number of previous positions in the cache.
        theta: factor of the dot products; more makes the cache more selective.
        weight: lambda, weight of the cache in the mixture, between 0 and 1.

    Raises:
        InputError: an argument is out of range.
    """

    size: int = 3785
    theta: float = 0.6625
    weight: float = 0.1279

    def __post_init__(self) -> None:
        limits.check_whole("size of the cache", self.size, limits.INPUT_LENGTH)
        limits.check_number("theta of the cache", self.theta, limits.TEMPERATURE)
        limits.check_number("weight of the cache", self.weight, 1.0, above=True)
        if self.weight == 1.0:
            raise InputError(
                "weight of the cache: expected a number below 1, since the first token has no cache"
            )


class CacheMemory:
    """Contents of a neural cache while a text is read."""

    def __init__(self, settings: NeuralCache) -> None:
        self.settings = settings
        self._keys: Tensor | None = None
        self._words = torch.zeros(0, dtype=torch.int64)

    def mix(self, hidden: Tensor, targets: Tensor, log_probs: Tensor) -> Tensor:
        """Returns the mixture's log-probabilities of the next tokens of the text, and stores these tokens.

        Args:
            hidden: inputs of the output layer, (N, D). targets: the tokens that follow, (N,).
            log_probs: the model's log-probabilities of these, (N,).
        """
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if self._keys is None:
            self._keys, self._words = hidden[:0], targets[:0]
        before, size = len(self._keys), self.settings.size
        keys, words = torch.cat([self._keys, hidden]), torch.cat([self._words, targets])
        rows = max(1, _VALUES // (size + 1) // 2)
        parts = [
            self._mixed(keys, words, range(first, min(first + rows, len(keys))), log_probs[first - before :])
            for first in range(before, len(keys), rows)
        ]
        self._keys, self._words = keys[-size:].clone(), words[-size:].clone()
        return torch.cat(parts)

    def _mixed(self, keys: Tensor, words: Tensor, positions: range, log_probs: Tensor) -> Tensor:
        """Returns the mixture at some positions, of which ``log_probs`` begins with those of the model."""
        weight, size, last = self.settings.weight, self.settings.size, positions.stop
        first = max(0, positions.start - size)
        here = torch.arange(positions.start, last, device=keys.device)[:, None]
        there = torch.arange(first, last, device=keys.device)
        hidden = (there >= here) | (there < here - size)
        scores = self.settings.theta * keys[positions.start : last] @ keys[first:last].t()
        scores = scores.masked_fill_(hidden, -math.inf)
        total = scores.logsumexp(1)
        other = words[positions.start : last, None] != words[first:last]
        cached = scores.masked_fill_(other, -math.inf).logsumexp(1) - total
        model = log_probs[: len(positions)]
        mixed = torch.logaddexp(model + math.log1p(-weight), cached.to(model.dtype) + math.log(weight))
        return torch.where(here[:, 0] > 0, mixed, model)
