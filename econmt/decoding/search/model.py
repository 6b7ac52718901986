"""Interface of a model for searches, which :class:`econmt.model.IncrementalModel` and ensembles have.

Shapes: B sentences, S source positions, K rows a sentence at most, R rows (hypotheses), V target vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from torch import Tensor

State = TypeVar("State", bound="SearchState")


class SearchState(Protocol):
    """State of R rows of a search; its content is private to the model.

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

    def length_ratios(self, encoded: Any, /) -> Tensor:
        """Target tokens expected for each source token (B,), both with their ends, of a model with a length task."""

    def restrict(self, state: Any, words: Tensor, allowed: Tensor, /) -> Any:
        """A first state from which steps give log-probabilities of a few words (R, N) instead of all.

        Args:
            state: the first one. words: (N,) int64 ids, rising.
            allowed: (B, N) bool which of them each sentence may have; others have no probability.
        """

    def step(self, tokens: Tensor, state: Any, /) -> tuple[Tensor, Tensor, Any]:
        """Read one token a row.

        Args:
            tokens: (R,) int64 the tokens before, BOS at first. state: a :class:`SearchState` of R rows.

        Returns:
            Log-probabilities of the next token (R, V) float32, which the caller may overwrite; attention (R, S);
            and the state after the step.
        """


class SearchGrid(Protocol):
    """Model state at fixed addresses: B slots of a sentence and K rows each, and a waiting room of E sentences.

    Every call changes tensors in place and waits for nothing. R = B K rows; those of a slot follow one another.
    """

    def encode(self, source: Tensor, lengths: Tensor, /) -> None:
        """Fills the waiting room with ``source`` (E, S) int64, EOS included, padded; ``lengths`` (E,) count EOS."""

    def put(self, slots: Tensor, places: Tensor, /) -> None:
        """Puts the sentences at ``places`` (N,) of the waiting room into ``slots`` (N,), each in its slot's first row.

        The same pair may come several times.
        """

    def step(self, tokens: Tensor, /) -> tuple[Tensor, Tensor]:
        """Reads one token a row: log-probabilities (R, V), or the same up to a constant a row, and attention (R, S)."""

    def select(self, rows: Tensor, /) -> None:
        """Every row goes on from what the step has made of one of ``rows`` (R,) int64, which is of the same slot."""
