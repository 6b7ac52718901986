"""State of the rows of a search.

Shapes: B sentences, S source positions, K rows a sentence at most, R rows (hypotheses), H decoder size, A attention
size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from econmt.model.inference.sources import Sources
from econmt.model.inference.words import Shortlist


class IncrementalState(NamedTuple):
    """State of R rows of a search.

    Attributes:
        sources: of B sentences, which the rows share.
        cells: (R,) int64 the place of each row in a grid (B, width): the sentence times the width, plus the row's
            number among those of its sentence; or None: the rows are the grid.
        width: columns of that grid.
        hidden, memory: of every layer h, in the type of products, and c (R, H); of other cells than the LSTM memory
            has all of their states, layer by layer, and hidden nothing. output: o (R, H).
        shortlist: the output layer where sentences may have a few words alone.
        length_ratios: (B,) of the first state of a model with a length task, else None.
    """

    sources: Sources
    cells: Tensor | None
    width: int
    hidden: tuple[Tensor, ...]
    memory: tuple[Tensor, ...]
    output: Tensor
    shortlist: Shortlist | None = None
    length_ratios: Tensor | None = None

    def select(self, rows: Tensor, cells: Tensor, width: int) -> IncrementalState:
        """See :meth:`econmt.decoding.search.model.SearchState.select`."""
        hidden, memory = (
            tuple(part.index_select(0, rows) for part in parts) for parts in (self.hidden, self.memory)
        )
        output = self.output.index_select(0, rows)
        return IncrementalState(self.sources, cells, width, hidden, memory, output, self.shortlist)

    def keep(self, sentences: Tensor) -> IncrementalState:
        """See :meth:`econmt.decoding.search.model.SearchState.keep`."""
        owners = self.owners
        assert self.cells is not None
        moved = (torch.searchsorted(sentences, owners) - owners) * self.width
        shortlist = None if self.shortlist is None else self.shortlist.keep(sentences)
        sources = self.sources.keep(sentences)
        return self._replace(sources=sources, cells=self.cells + moved, shortlist=shortlist)

    @property
    def owners(self) -> Tensor:
        """(R,) int64 the sentence of each row; rows are in cells."""
        assert self.cells is not None
        return torch.div(self.cells, self.width, rounding_mode="floor")
