"""Ensemble of models with averaged predictions.

Shapes: B sentences, S source positions, R rows, V target vocabulary, M models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from econmt.decoding.search.model import SearchModel, SearchState

EnsembleMode = Literal["linear", "log_linear"]


class EnsembleState(NamedTuple):
    """States of all models for the same hypotheses."""

    states: tuple[SearchState, ...]

    def select(self, rows: Tensor, cells: Tensor, width: int) -> EnsembleState:
        """See :meth:`SearchState.select`."""
        return EnsembleState(tuple(state.select(rows, cells, width) for state in self.states))

    def keep(self, sentences: Tensor) -> EnsembleState:
        """See :meth:`SearchState.keep`."""
        return EnsembleState(tuple(state.keep(sentences) for state in self.states))


class Ensemble:
    """Models with the same vocabularies, averaged at every step; implements :class:`SearchModel`.

    ``linear`` averages their probabilities, ``log_linear`` their log-probabilities, which are then normalised. The
    attention is averaged too.
    """

    def __init__(self, models: Sequence[SearchModel], mode: EnsembleMode) -> None:
        self.models = tuple(models)
        self.mode = mode

    def encode(self, source: Tensor, lengths: Tensor) -> EnsembleState:
        """See :meth:`SearchModel.encode`."""
        return EnsembleState(tuple(model.encode(source, lengths) for model in self.models))

    def restrict(self, state: EnsembleState, words: Tensor, allowed: Tensor) -> EnsembleState:
        """See :meth:`SearchModel.restrict`."""
        pairs = zip(self.models, state.states, strict=True)
        return EnsembleState(tuple(model.restrict(each, words, allowed) for model, each in pairs))

    def step(self, tokens: Tensor, state: EnsembleState) -> tuple[Tensor, Tensor, EnsembleState]:
        """See :meth:`SearchModel.step`."""
        parts = [model.step(tokens, each) for model, each in zip(self.models, state.states, strict=True)]
        log_probs = average_log_probs(torch.stack([part[0] for part in parts]), self.mode)
        attention = torch.stack([part[1] for part in parts]).mean(dim=0)
        return log_probs, attention, EnsembleState(tuple(part[2] for part in parts))


def average_log_probs(log_probs: Tensor, mode: EnsembleMode) -> Tensor:
    """Averages the log-probabilities (M, ..., V) of models to those of the ensemble, (..., V)."""
    if mode == "linear":
        return log_probs.logsumexp(dim=0) - math.log(len(log_probs))
    return log_probs.mean(dim=0).log_softmax(dim=-1)


def as_one(models: Sequence[SearchModel], mode: EnsembleMode) -> SearchModel:
    """Returns the only model, or the ensemble of several."""
    return models[0] if len(models) == 1 else Ensemble(models, mode)
