"""Building blocks of a forward pass that is divided over ranks: parts, chunks of time, stacks of layers, look-ups.

An embedding that is tied to the output layer has its rows divided over ranks. Each rank looks up the words in its rows,
with zeros for the others, and the rank that reads the embeddings receives the sum. In the backward pass it broadcasts
the embeddings' gradient, and each rank accumulates its own rows: the vocabulary-parallel embedding of Shoeybi et al.
(2019), "Megatron-LM", section 3. This communicates N x E values in each direction, where a copy of the table would need
its V x E gradient, and the updated rows after each update.

Shapes: B rows, T steps, C steps of a chunk, H hidden size, D input size of the output layer, N words looked up, in any
shape (...), E embedding size, V vocabulary, v rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.model.layers import LayerStage
from econmt.parallel.pipeline.plan import Boundary, Like, Output, PipelinePart
from econmt.parallel.pipeline.stages import Stages, even_rows
from econmt_ops.lstm.chunked import ChunkedLSTM
from econmt_ops.products.dropout import Seed, apply_dropout, dropout, keep_mask
from econmt_ops.products.look_up import add_look_up_gradient


class Chunks:
    """Chunks of one side of a batch, at most ``chunks``; fewer if these suffice at the same length.

    Attributes:
        steps, length: Number of positions, and length of every chunk but the last.
        sizes: Lengths of all chunks.
    """

    def __init__(self, steps: int, chunks: int) -> None:
        self.steps, self.length = steps, -(-steps // chunks)
        self.sizes = [min(self.length, steps - begin) for begin in range(0, steps, self.length)]


class ChunkedStack(NamedTuple):
    """Stack of a model's recurrent layers, each of which runs on one chunk of time after the other.

    Attributes:
        stages: Layers, bottom first. homes: Their ranks.
        cuts: Chunks.
        probability, variational: Dropout of the layers' inputs; if variational, all positions of a row share one mask.
        name: Layer of the memory ledger.
        options: Returns the options of a layer's call for the chunk that begins at a position.
        reverse: True if the last chunk comes first.
        attend: Adds attention to the bottom layer's outputs for a chunk, whose contexts all layers above it read.
    """

    stages: Sequence[LayerStage]
    homes: Sequence[int]
    cuts: Chunks
    probability: float
    variational: bool
    name: str
    options: Callable[[int], dict[str, Any]]
    reverse: bool = False
    attend: Callable[[Output, int], Output] | None = None


class Parts:
    """Forward pass of a batch up to the output layer's input; every rank lists all parts in the same order.

    Args:
        targets: Target tokens, (B, T).
        dtype: Type of what the ranks exchange.

    Attributes:
        look_ups: Look-ups in the output layer's matrix, if an embedding is tied to it.
        hidden: Output that the output layer reads, (B, T, D).
    """

    hidden: Output

    def __init__(self, targets: Tensor, dtype: torch.dtype) -> None:
        self.targets, self.dtype = targets, dtype
        self.parts: list[PipelinePart] = []
        self.look_ups: list[LookUp] = []

    def like(self, *shape: int) -> Like:
        """Describes a tensor with a row for each of the batch."""
        return Like((len(self.targets), *shape), self.dtype)

    def add(
        self,
        rank: int,
        run: Callable[..., Sequence[Tensor]],
        inputs: Sequence[Output] = (),
        outputs: Sequence[Like] = (),
        layer: str = "decoder",
        after: Callable[[], None] | None = None,
    ) -> int:
        """Adds a part, see :class:`~econmt.parallel.pipeline.plan.PipelinePart`; returns its number."""
        self.parts.append(PipelinePart(rank, run, tuple(inputs), tuple(outputs), layer, after))
        return len(self.parts) - 1

    def add_embedding(
        self,
        table: nn.Embedding,
        divided: Tensor,
        ids: Tensor,
        cuts: Chunks,
        drop: Callable[[Tensor], Tensor],
    ) -> list[list[Output]]:
        """Adds embeddings (B, C, E) of ids (B, T) on the first rank, with dropout; returns their output by chunk.

        A look-up in the matrix ``divided``, whose rows are divided over the ranks, is one of ``look_ups``.
        """
        look_up = LookUp(ids, 0) if table.weight is divided else None
        self.look_ups += [] if look_up is None else [look_up]

        def run() -> Sequence[Tensor]:
            return torch.split(drop(table(ids) if look_up is None else look_up()), cuts.length, 1)

        likes = [Like((len(ids), size, table.embedding_dim), table.weight.dtype) for size in cuts.sizes]
        number = self.add(0, run, (), likes, "embedding")
        return [[(number, chunk)] for chunk in range(len(likes))]

    def add_stack(
        self, stack: ChunkedStack, inputs: Sequence[Sequence[Output]], states: Sequence[Sequence[Output]] = ()
    ) -> tuple[list[Output], list[Sequence[Output]]]:
        """Adds the parts of a stack, among them those that prepare layers and, at last, finish their gradients.

        Args:
            inputs: Outputs that the bottom layer reads, for each chunk.
            states: First h and c of each layer; zeros if empty.

        Returns:
            The top layer's outputs for each chunk, and the last h and c of each layer.
        """
        layers = [
            self._add_layer(stage, home, stack.name)
            for stage, home in zip(stack.stages, stack.homes, strict=True)
        ]
        last: list[Sequence[Output]] = [*states] or [()] * len(layers)
        masks: dict[int, Tensor] = {}
        tops: dict[int, Output] = {}
        chunks = range(len(stack.cuts.sizes))
        for chunk in reversed(chunks) if stack.reverse else chunks:
            below, contexts = inputs[chunk], list[Output]()
            for number, (stage, home) in enumerate(zip(stack.stages, stack.homes, strict=True)):
                run = _run_layer(stack, number, chunk, layers[number], masks, len(below), bool(last[number]))
                likes = self.like(stack.cuts.sizes[chunk], stage.size), self.like(stage.size)
                part = self.add(home, run, (*below, *contexts, *last[number]), likes, stack.name)
                below, last[number] = [(part, 0)], [(part, 1), (part, 2)]
                if stack.attend is not None and not contexts:
                    contexts = [stack.attend(below[0], chunk)]
            tops[chunk] = below[0]
        return [tops[chunk] for chunk in chunks], last

    def _add_layer(self, stage: LayerStage, home: int, name: str) -> list[ChunkedLSTM]:
        """Adds the part that prepares a layer; returns a list that holds the layer once the part has run."""
        prepared: list[ChunkedLSTM] = []

        def prepare() -> Sequence[Tensor]:
            prepared.append(ChunkedLSTM(stage.weights()))
            return ()

        self.add(home, prepare, layer=name, after=lambda: prepared[0].backward())
        return prepared


def _run_layer(
    stack: ChunkedStack,
    number: int,
    chunk: int,
    layer: list[ChunkedLSTM],
    masks: dict[int, Tensor],
    count: int,
    has_state: bool,
) -> Callable[..., Sequence[Tensor]]:
    """Returns a function from ``count`` inputs, contexts and perhaps a state to outputs (B, C, H), h and c (B, H)."""
    stage, begin = stack.stages[number], chunk * stack.cuts.length

    def drop(values: Tensor, seed: Seed) -> Tensor:
        """Applies a slice of the mask that one process would draw; each layer's mask is drawn once."""
        if stack.variational and values.device.type != "cpu":
            # A GPU kernel generates the mask while it reads the values.
            return dropout(values, stack.probability, seed, variational=True, index=stage.mask)
        if number not in masks:
            shape = (len(values), 1 if stack.variational else stack.cuts.steps, values.shape[2])
            masks[number] = keep_mask(shape, stack.probability, seed, values.device, stage.mask)
        mask = masks[number] if stack.variational else masks[number][:, begin : begin + values.shape[1]]
        return apply_dropout(values, mask, stack.probability)

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        end = len(inputs) - 2 * has_state
        state = (inputs[end], inputs[end + 1]) if has_state else None
        recurrence = partial(layer[0], state=state, **stack.options(begin))
        outputs, (h, c) = stage.run(joined(inputs[:count]), drop, recurrence, inputs[count:end])
        return outputs, h, c

    return run


def joined(inputs: Sequence[Tensor], chunks: int = 1) -> Tensor:
    """Concatenates tensors in chunk order: those of a chunk along features, then the chunks along time."""
    width = len(inputs) // chunks
    parts = [torch.cat([*inputs[begin : begin + width]], -1) for begin in range(0, len(inputs), width)]
    return torch.cat(parts, 1)


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
