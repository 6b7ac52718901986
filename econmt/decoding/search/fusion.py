"""Shallow fusion: a search for translations listens to a language model, too (Gulcehre et al. 2015, arXiv 1503.03535).

The score of a token is log p(token | source, prefix) + weight log q(token | prefix), with q the language model, which
begins each translation as a line at the beginning of its text. The log-probability of a translation remains p's.

Shapes: B sentences, K beam size, R rows, V target vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from econmt.data.text.vocabulary import EOS
from econmt.model.language_model import LanguageModel, State
from econmt_ops.core.precision import autocast_to


class ShallowFusion(NamedTuple):
    """Language model of a search, in evaluation mode on its device, over the target vocabulary.

    Attributes:
        weight: factor of its log-probabilities.
        precision: type of its matrix products, float32, bfloat16 or float16.
    """

    model: LanguageModel
    weight: float
    precision: torch.dtype


class FusedRows:
    """States of a language model for the rows of a search.

    Args:
        fusion: the language model and its weight. rows: R at the first step.
    """

    def __init__(self, fusion: ShallowFusion, rows: int) -> None:
        self._fusion = fusion
        self._tokens = torch.full((rows,), EOS)
        self._state: State | None = None
        self._added = torch.zeros(0)

    def add_to(self, log_probs: Tensor) -> None:
        """Adds the weighted log-probabilities of the next token to those of the search, (R, V), in place."""
        model, weight, precision = self._fusion
        with autocast_to(log_probs.device, precision):
            hidden, self._state = model(self._tokens.to(log_probs.device)[:, None], self._state)
            self._added = model.log_probabilities(hidden[:, 0]) * weight
        log_probs += self._added

    def added(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Returns what was added for ``tokens`` in the rows ``parents``, (B, K) float64; all tensors on the CPU."""
        device = self._added.device
        return self._added[parents.to(device), tokens.to(device)].double().cpu()

    def grow(self, parents: Tensor, tokens: Tensor) -> None:
        """Informs that the rows are now those that extend ``parents`` (R',) by ``tokens`` (R',)."""
        self._tokens = tokens
        if self._state is not None:
            rows = parents.to(self._added.device)
            self._state = tuple(tuple(part.index_select(0, rows) for part in parts) for parts in self._state)
