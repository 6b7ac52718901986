"""Look-ups in a table of which each rank has rows, as that of an embedding that is tied to the output layer.

Each rank looks up the words whose rows it has, the others' vectors are zeros, and the rank that reads them gets the
sum; on the way back it gives all ranks the vectors' gradient, of which each adds up the rows that it has: the
vocabulary-parallel embedding of Shoeybi et al. (2019), "Megatron-LM", section 3. That takes N x E values there and as
many back, where a copy of the table would take V x E of its gradient, and the rows of the others after each update.

Shapes: N words looked up, in any shape (...), E width, V vocabulary, v rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.parallel.pipeline.boundary import Boundary
from econmt.parallel.pipeline.stages import Stages, even_rows
from econmt_ops.core.look_up import add_look_up_gradient


class LookUp:
    """Words that one rank reads.

    Args:
        ids: (...), int64. rank: which reads them.

    Attributes:
        ids, rank: see above.
        boundary: has the gradient (..., E) of the vectors when the way back has come to them; there alone.
    """

    def __init__(self, ids: Tensor, rank: int) -> None:
        self.ids, self.rank = ids, rank
        self.boundary = Boundary()
        self._vectors: Tensor | None = None

    def give(self, vectors: Tensor) -> None:
        """Leaves the vectors (..., E), found in the rows of all ranks, to be read."""
        self._vectors = self.boundary.cross(vectors)

    def __call__(self) -> Tensor:
        """The vectors, once: nothing keeps them here."""
        vectors, self._vectors = self._vectors, None
        assert vectors is not None
        return vectors


def reader(
    table: nn.Embedding, divided: Tensor, ids: Tensor, rank: int, look_ups: list[LookUp]
) -> Callable[[], Tensor]:
    """Returns a function that gives a rank the embeddings (..., E) of ids (...).

    Args:
        table: of the embeddings.
        divided: the matrix of which each rank has rows; another one is wholly where it is read.
        ids: int64.
        rank: which reads.
        look_ups: gets what ranks have to exchange for it.
    """
    if table.weight is not divided:
        return lambda: table(ids)
    look_ups.append(LookUp(ids, rank))
    return look_ups[-1]


class DividedTable:
    """A table of which each rank has rows; all ranks call its methods in the same order.

    Args:
        rows: (v, E), this rank's.
        size: V.
        padding: the word whose row gets no gradient.
        stages: the ranks.
    """

    def __init__(self, rows: nn.Parameter, size: int, padding: int, stages: Stages) -> None:
        self._rows, self._padding, self._stages = rows, padding, stages
        self._first = even_rows(size, stages.size, stages.rank).start

    def look_up(self, wanted: LookUp) -> None:
        """Gives the rank that reads them the vectors."""
        places, count = self._places(wanted.ids), len(self._rows)
        with torch.no_grad():
            vectors = functional.embedding(places.clamp(max=count - 1), self._rows)
            vectors.masked_fill_((places == count).unsqueeze(-1), 0.0)
            self._stages.reduce(vectors, wanted.rank)
        if self._stages.rank == wanted.rank:
            wanted.give(vectors)

    def add_gradient(self, wanted: LookUp) -> None:
        """Adds that of the vectors to the gradient of this rank's rows, which is there already."""
        assert self._rows.grad is not None
        gradient, wanted.boundary.gradient = wanted.boundary.gradient, None
        if gradient is None:  # on the ranks that do not read, which are given it
            assert self._stages.rank != wanted.rank
            gradient = self._rows.new_empty(*wanted.ids.shape, self._rows.shape[1])
        gradient = gradient.contiguous()
        self._stages.broadcast(gradient, wanted.rank)
        ids = wanted.ids
        places = self._places(ids).masked_fill_(ids == self._padding, len(self._rows))
        add_look_up_gradient(self._rows.grad, gradient, places)

    def _places(self, ids: Tensor) -> Tensor:
        """Returns the index of each word among this rank's rows; v for words of other ranks."""
        places, count = ids - self._first, len(self._rows)
        return torch.where((places < 0) | (places > count), count, places)
