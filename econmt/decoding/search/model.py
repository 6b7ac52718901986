"""Interfaces of a translation model for searches, implemented by :class:`econmt.model.IncrementalModel` and ensembles.

Shapes: B sentences, S source positions, K maximum number of rows per sentence, R rows (hypotheses), V target
vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from torch import Tensor

State = TypeVar("State", bound="SearchState")


class SearchState(Protocol):
    """State of R rows of a search; its content is private to the model.

    The rows of a sentence share its encoded source. They have positions in a grid (B, K), called cells: the sentence
    times K, plus the number of the row within its sentence.
    """

    def select(self: State, rows: Tensor, cells: Tensor, width: int, /) -> State:
        """Returns the rows with indices ``rows`` (R',) int64, in that order; indices may repeat.

        ``cells`` (R',) int64 has the new cell of each row, within its sentence, no two equal; ``width`` is the new K.
        """

    def keep(self: State, sentences: Tensor, /) -> State:
        """Drops all sentences except those with indices ``sentences`` (C,) int64, sorted; dropped ones have no rows."""


class SearchModel(Protocol):
    """Model that extends translations by one token at a time."""

    def encode(self, source: Tensor, lengths: Tensor, /) -> Any:
        """Encodes sentences and returns the :class:`SearchState` before the first target token, one row per sentence.

        ``source`` (B, S) int64 includes EOS and is padded; ``lengths`` (B,) int64 include EOS.
        """

    def restrict(self, state: Any, words: Tensor, allowed: Tensor, /) -> Any:
        """Returns an initial state whose steps give log-probabilities (R, N) of selected words only.

        ``words`` (N,) int64 has their ids, sorted. Words outside of a sentence's mask in ``allowed`` (B, N) get -inf.
        """

    def step(self, tokens: Tensor, state: Any, /) -> tuple[Tensor, Tensor, Any]:
        """Reads one token per row, ``tokens`` (R,) int64, BOS at first; ``state`` is a :class:`SearchState` of R rows.

        Returns:
            Log-probabilities of the next token (R, V) float32, which the caller may overwrite; attention (R, S); and
            the state after the step.
        """


class SearchGrid(Protocol):
    """Model state at fixed addresses, for CUDA graphs: B slots of K rows, and a buffer of B waiting sentences.

    Every call changes tensors in place and does not synchronise. R = B K; the rows of a slot are consecutive.
    """

    def encode(self, source: Tensor, lengths: Tensor, /) -> None:
        """Encodes the waiting sentences: ``source`` (B, S) int64 including EOS, padded; ``lengths`` (B,)."""

    def put(self, slots: Tensor, entries: Tensor, /) -> None:
        """Copies the waiting sentences ``entries`` (N,) into ``slots`` (N,), each into the first row of its slot.

        The same pair may occur several times.
        """

    def step(self, tokens: Tensor, /) -> tuple[Tensor, Tensor]:
        """Reads one token per row; returns log-probabilities (R, V), up to a constant per row, and attention (R, S)."""

    def select(self, rows: Tensor, /) -> None:
        """Continues each row from the state after the step of one of ``rows`` (R,) int64, which is in the same slot."""
