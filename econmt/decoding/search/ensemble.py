"""Several models that translate as one.

Shapes: B sentences, S source positions, R rows, V target vocabulary, M models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from econmt.decoding.search.model import SearchModel, SearchState

EnsembleMode = Literal["linear", "log_linear"]


class EnsembleState(NamedTuple):
    """The states of all models, row by row the same hypotheses."""

    states: tuple[SearchState, ...]

    def select(self, rows: Tensor, cells: Tensor, width: int) -> EnsembleState:
        """See :meth:`SearchState.select`; ``rows`` and ``cells`` (R',)."""
        return EnsembleState(tuple(state.select(rows, cells, width) for state in self.states))

    def keep(self, sentences: Tensor) -> EnsembleState:
        """See :meth:`SearchState.keep`; ``sentences`` (C,)."""
        return EnsembleState(tuple(state.keep(sentences) for state in self.states))


class Ensemble:
    """Models with the same vocabularies, averaged at every step; a :class:`SearchModel` itself.

    ``linear`` takes the mean of their probabilities, ``log_linear`` the mean of their log-probabilities, normalised
    again so that it is a distribution. Their attention is averaged.
    """

    def __init__(self, models: Sequence[SearchModel], mode: EnsembleMode) -> None:
        self.models = tuple(models)
        self.mode = mode

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Any, ...]:
        """Encodes the source (B, S) with lengths (B,) by each model."""
        return tuple(model.encode(source, lengths) for model in self.models)

    def initial_state(self, encoded: tuple[Any, ...]) -> EnsembleState:
        """The first state of each model."""
        states = (model.initial_state(part) for model, part in zip(self.models, encoded, strict=True))
        return EnsembleState(tuple(states))

    def length_ratios(self, encoded: tuple[Any, ...]) -> Tensor:
        """The mean of what the models expect (B,), as Sockeye has it."""
        pairs = zip(self.models, encoded, strict=True)
        return torch.stack([model.length_ratios(part) for model, part in pairs]).mean(dim=0)

    def restrict(self, state: EnsembleState, words: Tensor, allowed: Tensor) -> EnsembleState:
        """See :meth:`SearchModel.restrict`; words (N,), allowed (B, N)."""
        pairs = zip(self.models, state.states, strict=True)
        return EnsembleState(tuple(model.restrict(each, words, allowed) for model, each in pairs))

    def step(self, tokens: Tensor, state: EnsembleState) -> tuple[Tensor, Tensor, EnsembleState]:
        """One step of every model from tokens (R,); see :meth:`SearchModel.step`."""
        parts = [model.step(tokens, each) for model, each in zip(self.models, state.states, strict=True)]
        log_probs = average_log_probs(torch.stack([part[0] for part in parts]), self.mode)
        attention = torch.stack([part[1] for part in parts]).mean(dim=0)
        return log_probs, attention, EnsembleState(tuple(part[2] for part in parts))


def average_log_probs(log_probs: Tensor, mode: EnsembleMode) -> Tensor:
    """The ensemble's log-probabilities (..., V) of its models' ``log_probs`` (M, ..., V)."""
    if mode == "linear":
        return log_probs.logsumexp(dim=0) - math.log(len(log_probs))
    return log_probs.mean(dim=0).log_softmax(dim=-1)


def as_one(models: Sequence[SearchModel], mode: EnsembleMode) -> SearchModel:
    """The only model, or the ensemble of several."""
    return models[0] if len(models) == 1 else Ensemble(models, mode)
