"""State of the rows of a search.

Shapes: B sentences, S source positions, K rows a sentence at most, R rows (hypotheses), H decoder size, A attention
size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.model.inference.copying import SourceWords
from econmt.model.inference.layout import is_watched


class Sources(NamedTuple):
    """Sources of B sentences.

    Attributes:
        keys: (B, S, A), as the scores of a step want them. factors: whether they are exponentials.
        values: (B, S, .) what the attention sums. padding: (B, S), True past a sentence's length.
        lengths: (B,).
        kernels: our kernels on keys and values, where these stay at their place; or None.
        words: what may be copied, of a model that copies.
    """

    keys: Tensor
    factors: bool
    values: Tensor
    padding: Tensor
    lengths: Tensor
    kernels: Any = None
    words: SourceWords | None = None

    def keep(self, sentences: Tensor) -> Sources:
        """The sentences with indices ``sentences`` (C,), cut to the longest of them."""
        lengths = self.lengths[sentences]
        size = self.keys.shape[1] if is_watched() else int(lengths.max())
        keys, values, padding = (
            part[:, :size].index_select(0, sentences) for part in (self.keys, self.values, self.padding)
        )
        words = None if self.words is None else self.words.keep(sentences, size)
        return Sources(keys, self.factors, values, padding, lengths, words=words)


class Shortlist(NamedTuple):
    """The output layer of a few words.

    Attributes:
        output: the product with the weights of N words. barred: (B, N) 0, and -inf where a sentence must not have one.
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
        """(R,) int64 sentence of each row."""
        cells = self.cells
        if cells is None:
            cells = torch.arange(len(self.output), device=self.output.device)
        return torch.div(cells, self.width, rounding_mode="floor")
