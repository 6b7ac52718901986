"""What a search asks of a model; :class:`econmt.model.TranslationModel` has it, and so does an ensemble.

Shapes: B sentences, S source positions, N rows (sentences times hypotheses), V target vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from torch import Tensor

State = TypeVar("State", bound="SearchState")


class SearchState(Protocol):
    """Where N rows of a search stand; what it holds is the model's own business."""

    def select(self: State, rows: Tensor, /) -> State:
        """The rows with indices ``rows`` (M,) int64, in that order; repeats are allowed."""

    def reorder(self: State, rows: Tensor, /) -> State:
        """As :meth:`select` where each new row has the source sentence of the row it replaces (M = N)."""


class SearchModel(Protocol):
    """A model that extends translations by one token at a time."""

    def encode(self, source: Tensor, lengths: Tensor, /) -> Any:
        """Encode ``source`` (B, S) int64, EOS included, padded; ``lengths`` (B,) int64 count EOS."""

    def initial_state(self, encoded: Any, /) -> Any:
        """The :class:`SearchState` before the first target token, one row a sentence."""

    def step(self, tokens: Tensor, state: Any, /) -> tuple[Tensor, Tensor, Any]:
        """Read one token a row.

        Args:
            tokens: (N,) int64 the tokens before, BOS at first. state: a :class:`SearchState` of N rows.

        Returns:
            Log-probabilities of the next token (N, V) float32, which the caller may overwrite; attention (N, S);
            and the state after the step.
        """
