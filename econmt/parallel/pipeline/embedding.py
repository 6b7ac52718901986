"""Look-ups in an embedding table whose rows are divided over ranks, since it is tied to the output layer.

Each rank looks up the words in its rows, with zeros for the others, and the rank that reads the embeddings receives the
sum. In the backward pass it broadcasts the embeddings' gradient, and each rank accumulates its own rows: the
vocabulary-parallel embedding of Shoeybi et al. (2019), "Megatron-LM", section 3. This communicates N x E values in each
direction, where a copy of the table would need its V x E gradient, and the updated rows after each update.

Shapes: N words looked up, in any shape (...), E embedding size, V vocabulary, v rows of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.parallel.pipeline.plan import Boundary
from econmt.parallel.pipeline.stages import Stages, even_rows
from econmt_ops.products.look_up import add_look_up_gradient


class LookUp:
    """Look-up of words that one rank reads.

    Attributes:
        ids: Word ids, (...), int64.
        rank: Rank that reads the embeddings.
        boundary: Holds the gradient (..., E) of the embeddings after the backward pass, on the reading rank only.
    """

    def __init__(self, ids: Tensor, rank: int) -> None:
        self.ids, self.rank = ids, rank
        self.boundary = Boundary()
        self._vectors: Tensor | None = None

    def give(self, vectors: Tensor) -> None:
        """Stores the embeddings (..., E), summed over all ranks, until they are read."""
        self._vectors = self.boundary.cross(vectors)

    def __call__(self) -> Tensor:
        """Returns the embeddings and drops the reference to them, so that they can be read once."""
        vectors, self._vectors = self._vectors, None
        assert vectors is not None
        return vectors


class DividedTable:
    """Embedding table whose rows are divided over ranks; all ranks call its methods in the same order.

    Args:
        rows: Rows of this rank, (v, E).
        size: V.
        padding: Word whose row gets no gradient.
    """

    def __init__(self, rows: nn.Parameter, size: int, padding: int, stages: Stages) -> None:
        self._rows, self._padding, self._stages = rows, padding, stages
        self._first = even_rows(size, stages.size, stages.rank).start

    def look_up(self, wanted: LookUp) -> None:
        """Looks up the embeddings and sums them on the rank that reads them."""
        local_ids, count = self._local_ids(wanted.ids), len(self._rows)
        with torch.no_grad():
            vectors = functional.embedding(local_ids.clamp(max=count - 1), self._rows)
            vectors.masked_fill_((local_ids == count).unsqueeze(-1), 0.0)
            self._stages.reduce(vectors, wanted.rank).wait()
        if self._stages.rank == wanted.rank:
            wanted.give(vectors)

    def add_gradient(self, wanted: LookUp) -> None:
        """Adds the embeddings' gradient to the existing gradient of this rank's rows."""
        assert self._rows.grad is not None
        gradient, wanted.boundary.gradient = wanted.boundary.gradient, None
        if gradient is None:  # on ranks that do not read, which receive it
            assert self._stages.rank != wanted.rank
            gradient = self._rows.new_empty(*wanted.ids.shape, self._rows.shape[1])
        gradient = gradient.contiguous()
        self._stages.broadcast(gradient, wanted.rank).wait()
        ids = wanted.ids
        local_ids = self._local_ids(ids).masked_fill_(ids == self._padding, len(self._rows))
        add_look_up_gradient(self._rows.grad, gradient, local_ids)

    def _local_ids(self, ids: Tensor) -> Tensor:
        """Converts word ids to row numbers of this rank; v for words of other ranks."""
        local_ids, count = ids - self._first, len(self._rows)
        return torch.where((local_ids < 0) | (local_ids > count), count, local_ids)
