"""What a search asks of a model; :class:`econmt.model.IncrementalModel` has it, and so does an ensemble.

Shapes: B sentences, S source positions, K rows a sentence at most, R rows (hypotheses), V target vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from torch import Tensor

State = TypeVar("State", bound="SearchState")


class SearchState(Protocol):
    """Where R rows of a search stand; what it holds is the model's own business.

    The rows of a sentence share what is known of it. They lie in a grid (B, K): a row's cell is its sentence times K,
    plus its number among the rows of that sentence.
    """

    def select(self: State, rows: Tensor, cells: Tensor, width: int, /) -> State:
        """The rows with indices ``rows`` (R',) int64, in that order; repeats are allowed.

        Args:
            rows: (R',) int64. cells: (R',) int64 where they lie from now on, each in a cell of its own, with the
                sentence that it had. width: K from now on.
        """

    def keep(self: State, sentences: Tensor, /) -> State:
        """Only the sentences with indices ``sentences`` (C,) int64, rising, which are those of all rows."""


class SearchModel(Protocol):
    """A model that extends translations by one token at a time."""

    def encode(self, source: Tensor, lengths: Tensor, /) -> Any:
        """Encode ``source`` (B, S) int64, EOS included, padded; ``lengths`` (B,) int64 count EOS."""

    def initial_state(self, encoded: Any, /) -> Any:
        """The :class:`SearchState` before the first target token, one row a sentence."""

    def step(self, tokens: Tensor, state: Any, /) -> tuple[Tensor, Tensor, Any]:
        """Read one token a row.

        Args:
            tokens: (R,) int64 the tokens before, BOS at first. state: a :class:`SearchState` of R rows.

        Returns:
            Log-probabilities of the next token (R, V) float32, which the caller may overwrite; attention (R, S);
            and the state after the step.
        """
