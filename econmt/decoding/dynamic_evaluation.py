"""Dynamic evaluation of a language model: its parameters follow the text (Krause et al. 2018, arXiv 1709.07432).

The text is read in segments of a few tokens. After each, with g the gradient of the segment's mean loss and q_0 the
trained parameters, the parameters q change by

    - rate g + decay (q_0 - q)                                                   stochastic gradient descent
    - rate g / (r + eps) + min(decay r / mean(r), 1) (q_0 - q)                   with statistics, r = sqrt(mean(g'^2))

where g' are the gradients of segments of a training text in 100 rows, and mean(r) is the mean over all parameter
tensors of their means. No gradient flows from a segment into the one before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.config import limits
from econmt.data.text.vocabulary import EOS
from econmt.errors import InputError
from econmt.model.language_model import LanguageModel, State

EPSILON = 1e-3
"""Added to r."""

ROWS = 100
"""Largest number of rows into which the training text is cut for the statistics."""

RATES = {False: 0.3, True: 0.002}
"""Default rates, without and with statistics."""


@dataclass(frozen=True)
class DynamicEvaluation:
    """Settings of dynamic evaluation.

    Args:
        rate: learning rate; None: 0.3, or 0.002 with statistics.
        decay: how far the parameters return to the trained ones after each segment, 0 to 1.
        segment: number of tokens of a segment.
        text: lines of a training text from which the statistics are computed; None: stochastic gradient descent.

    Raises:
        InputError: an argument is out of range.
    """

    rate: float | None = None
    decay: float = 0.02
    segment: int = 5
    text: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.rate is not None:
            limits.check_number("rate of dynamic evaluation", self.rate, limits.RATE, above=True)
        limits.check_number("decay of dynamic evaluation", self.decay, 1.0)
        limits.check_whole("segment of dynamic evaluation", self.segment, limits.POSITIONS)
        if self.text is not None and not any(self.text):
            raise InputError("the text for statistics of dynamic evaluation is empty; give training text")


Losses = Callable[[LanguageModel, Tensor, Tensor, State | None], tuple[Tensor, Tensor, State]]
"""Function of a model, ids and targets (B, T) and states: output layer's inputs (B T, D), losses (B T,), states."""


class _Scales(NamedTuple):
    """Divisor of the gradient, and decay, of each parameter."""

    divisors: list[Tensor]
    decays: list[Tensor]


class DynamicModel:
    """Copy of a model whose parameters follow a text, and its place in the text.

    The result does not depend on how the text is divided into calls: tokens of an unfinished segment are read again
    with those that follow.

    Args:
        model: trained model, which is not changed.
        settings: rate, decay and segment.
        losses: computes the losses of a window.
        text: ids of the training text, ends of lines included; empty: no statistics.
    """

    def __init__(
        self, model: LanguageModel, settings: DynamicEvaluation, losses: Losses, text: Sequence[int]
    ) -> None:
        self._model = copy.deepcopy(model).eval().requires_grad_()
        self._trained = [parameter.detach() for parameter in model.parameters()]
        self._parameters: list[Tensor] = list(self._model.parameters())
        self._losses, self._segment = losses, settings.segment
        self._rate = RATES[bool(text)] if settings.rate is None else settings.rate
        self._decay = settings.decay
        self._scales = self._scaled(self._root_mean_squares(text)) if text else None
        self._state: State | None = None
        self._last = EOS
        self._pending: list[int] = []

    def read(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Reads the next ids; returns inputs of the output layer (N, D) and log-probabilities (N,), then learns."""
        parts = []
        position = 0
        while position < len(ids):
            known = len(self._pending)
            end = position + self._segment - known
            self._pending += ids[position:end]
            targets = torch.tensor([self._pending], device=self._parameters[0].device)
            inputs = torch.cat([targets.new_tensor([[self._last]]), targets[:, :-1]], 1)
            hidden, losses, state = self._losses(self._model, inputs, targets, self._state)
            parts.append((hidden.detach()[known:], -losses.detach()[known:]))
            if len(self._pending) == self._segment:
                self._learn(torch.autograd.grad(losses.mean(), self._parameters))
                self._state, self._last = _detached(state), self._pending[-1]
                self._pending = []
            position = end
        return torch.cat([hidden for hidden, _ in parts]), torch.cat([log_probs for _, log_probs in parts])

    @torch.no_grad()
    def _learn(self, gradients: tuple[Tensor, ...]) -> None:
        parameters, trained = self._parameters, self._trained
        if self._scales is None:
            torch._foreach_lerp_(parameters, trained, self._decay)
            torch._foreach_add_(parameters, gradients, alpha=-self._rate)
        else:
            torch._foreach_lerp_(parameters, trained, self._scales.decays)
            torch._foreach_addcdiv_(parameters, gradients, self._scales.divisors, value=-self._rate)

    def _root_mean_squares(self, text: Sequence[int]) -> list[Tensor]:
        """Computes r of each parameter."""
        device = self._parameters[0].device
        rows = max(1, min(ROWS, len(text) // self._segment))
        length = len(text) // rows
        ids = torch.tensor([EOS, *text[: rows * length]])
        inputs, targets = (part.view(rows, length).to(device) for part in (ids[:-1], ids[1:]))
        sums = [torch.zeros_like(parameter) for parameter in self._parameters]
        state, windows = None, range(0, length, self._segment)
        for first in windows:
            window = slice(first, first + self._segment)
            _, losses, state = self._losses(self._model, inputs[:, window], targets[:, window], state)
            gradients = torch.autograd.grad(losses.mean(), self._parameters)
            state = _detached(state)
            for total, gradient in zip(sums, gradients, strict=True):
                total.addcmul_(gradient, gradient)
        return [(total / len(windows)).sqrt_() for total in sums]

    def _scaled(self, roots: Sequence[Tensor]) -> _Scales:
        """Returns divisors and decays by the root mean square of each parameter's gradients."""
        mean = torch.stack([root.mean() for root in roots]).mean()
        decays = [(self._decay * root / mean).clamp_(max=1.0) for root in roots]
        return _Scales([root + EPSILON for root in roots], decays)


def _detached(state: State) -> State:
    return tuple(tuple(part.detach() for part in parts) for parts in state)
