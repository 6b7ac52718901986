"""Sources, shortlists and states of the rows of a search.

Shapes: B sentences, S source positions, K rows a sentence at most, R rows (hypotheses), H decoder size, A attention
size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.model.inference.layout import is_watched


class Sources(NamedTuple):
    """Sources of B sentences.

    Attributes:
        keys: keys as the scores of a step need them, (B, S, A). factors: True if they are exponentials of the keys.
        values: vectors that attention sums, (B, S, .). padding: True past a sentence's length, (B, S).
        lengths: (B,).
        kernels: launcher of Triton kernels bound to the addresses of keys and values; None: tensor operations.
        shares: shares of the positions in the coverage, (B, S, P); None without coverage.
    """

    keys: Tensor
    factors: bool
    values: Tensor
    padding: Tensor
    lengths: Tensor
    kernels: Any = None
    shares: Tensor | None = None

    def keep(self, sentences: Tensor) -> Sources:
        """Selects the sentences with indices ``sentences`` (C,), cut to the longest of them."""
        lengths = self.lengths[sentences]
        size = self.keys.shape[1] if is_watched() else int(lengths.max())
        keys, values, padding, *shares = (
            part[:, :size].index_select(0, sentences)
            for part in (self.keys, self.values, self.padding, self.shares)
            if part is not None
        )
        return Sources(keys, self.factors, values, padding, lengths, None, *shares)


class Shortlist(NamedTuple):
    """Output layer of N selected words.

    Attributes:
        output: output layer of these words, for tensor operations or the C library.
        masked: 0, or -inf for words that a sentence must not use, (B, N).
    """

    output: Any
    masked: Tensor

    def keep(self, sentences: Tensor) -> Shortlist:
        """Selects the sentences with indices ``sentences`` (C,)."""
        return self._replace(masked=self.masked.index_select(0, sentences))

    def logits(self, read: Tensor, owners: Tensor) -> Tensor:
        """Computes the logits (R, N) from the output layer's input (R, H) and each row's sentence, ``owners`` (R,)."""
        logits: Tensor = self.output(read)
        return logits.add_(self.masked.index_select(0, owners))


class IncrementalState(NamedTuple):
    """State of R rows of a search.

    Attributes:
        sources: sources of B sentences, shared by the rows.
        cells: position of each row in a grid (B, width): the sentence times the width, plus the number of the row
            within its sentence, (R,) int64; None: the rows are the whole grid.
        width: number of columns of that grid.
        hidden, memory: h, in the type of products, and c of each LSTM layer, (R, H). For other cells ``memory`` has all
            states, layer by layer, and ``hidden`` is empty.
        output: attentional hidden vector o, (R, H).
        coverage: coverage of the source positions, (R, S, W); None without one.
        shortlist: output layer of selected words; None: all words.
    """

    sources: Sources
    cells: Tensor | None
    width: int
    hidden: tuple[Tensor, ...]
    memory: tuple[Tensor, ...]
    output: Tensor
    coverage: Tensor | None = None
    shortlist: Shortlist | None = None

    def select(self, rows: Tensor, cells: Tensor, width: int) -> IncrementalState:
        """See :meth:`econmt.decoding.search.model.SearchState.select`."""
        hidden, memory = (
            tuple(part.index_select(0, rows) for part in parts) for parts in (self.hidden, self.memory)
        )
        output = self.output.index_select(0, rows)
        coverage = None if self.coverage is None else self.coverage.index_select(0, rows)
        return IncrementalState(self.sources, cells, width, hidden, memory, output, coverage, self.shortlist)

    def keep(self, sentences: Tensor) -> IncrementalState:
        """See :meth:`econmt.decoding.search.model.SearchState.keep`."""
        owners = self.owners
        assert self.cells is not None
        moved = (torch.searchsorted(sentences, owners) - owners) * self.width
        shortlist = None if self.shortlist is None else self.shortlist.keep(sentences)
        sources = self.sources.keep(sentences)
        coverage = None if self.coverage is None else self.coverage[:, : sources.keys.shape[1]]
        return self._replace(
            sources=sources, cells=self.cells + moved, coverage=coverage, shortlist=shortlist
        )

    def grid(self, rows: Tensor) -> Tensor:
        """Returns rows (R, ...) in their cells of a grid (B, K, ...), whose other cells are zero."""
        sentences, filled = len(self.sources.keys), rows
        if self.cells is not None:
            filled = rows.new_zeros(sentences * self.width, *rows.shape[1:]).index_copy_(0, self.cells, rows)
        return filled.view(sentences, self.width, *rows.shape[1:])

    @property
    def owners(self) -> Tensor:
        """Sentence of each row, (R,) int64."""
        cells = self.cells
        if cells is None:
            cells = torch.arange(len(self.output), device=self.output.device)
        return torch.div(cells, self.width, rounding_mode="floor")
