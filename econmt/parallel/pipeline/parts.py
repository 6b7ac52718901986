"""Building blocks of a forward pass that is divided over ranks: parts, chunks of time, and dropout on chunks.

Shapes: B rows, T steps, C steps of a chunk, H hidden size, D input size of the output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from econmt.parallel.pipeline.embedding import LookUp
from econmt.parallel.pipeline.plan import Like, Output, PipelinePart
from econmt_ops.core.weights import AnyLSTMWeights
from econmt_ops.lstm.chunked import ChunkedLSTM
from econmt_ops.products.dropout import Seed, apply_dropout, dropout, keep_mask


class Parts:
    """Forward pass of a batch up to the output layer's input; every rank lists all parts in the same order.

    Attributes:
        look_ups: Look-ups in the output layer's matrix, if an embedding is tied to it.
        targets: Target tokens, (B, T).
        hidden: Output that the output layer reads, (B, T, D).
        like: Shape and type of that output.
    """

    hidden: Output
    like: Like

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets
        self.parts: list[PipelinePart] = []
        self.look_ups: list[LookUp] = []

    def add(
        self,
        rank: int,
        run: Callable[..., Sequence[Tensor]],
        inputs: Sequence[Output] = (),
        outputs: Sequence[Like] = (),
        layer: str = "decoder",
    ) -> int:
        """Adds a part, see :class:`~econmt.parallel.pipeline.plan.PipelinePart`; returns its number."""
        self.parts.append(PipelinePart(rank, run, tuple(inputs), tuple(outputs), layer))
        return len(self.parts) - 1

    def add_stack(
        self, homes: Sequence[int], weights_of: Callable[[int], AnyLSTMWeights], name: str
    ) -> dict[int, ChunkedLSTM]:
        """Adds parts that prepare a stack's layers and, last in the backward pass, finish their weights' gradients.

        ``homes`` are the stages of the layers; ``name`` is a layer of the memory ledger.

        Returns:
            The layers of this rank by number, once their parts have run.
        """
        stack: dict[int, ChunkedLSTM] = {}

        def add(layer: int, home: int) -> None:
            def begin() -> Sequence[Tensor]:
                stack[layer] = ChunkedLSTM(weights_of(layer))
                return ()

            self.parts.append(PipelinePart(home, begin, layer=name, after=lambda: stack[layer].backward()))

        for layer, home in enumerate(homes):
            add(layer, home)
        return stack


class Chunks:
    """Chunks of one side of a batch, at most ``chunks``; fewer if these suffice at the same length.

    Attributes:
        steps, length: Number of positions, and length of every chunk but the last.
        sizes: Lengths of all chunks.
    """

    def __init__(self, steps: int, chunks: int) -> None:
        self.steps, self.length = steps, -(-steps // chunks)
        self.sizes = [min(self.length, steps - begin) for begin in range(0, steps, self.length)]

    def begin(self, chunk: int) -> int:
        """Returns the first position of a chunk."""
        return chunk * self.length


class ChunkedDropout:
    """Dropout on chunks (B, C, H) of sequences (B, T, H), with slices of the mask that one process would draw.

    If ``variational``, all positions of a row share one mask; ``steps`` is T.
    """

    def __init__(self, probability: float, variational: bool, steps: int) -> None:
        self._probability, self._variational, self._steps = probability, variational, steps
        self._masks: dict[int, Tensor] = {}

    def __call__(self, values: Tensor, layer: int, begin: int, seed: Seed | None, index: int = -1) -> Tensor:
        """Returns the values with dropout applied; unchanged if there is no seed.

        Args:
            values: Chunk of the inputs, (B, C, H).
            layer: Layer that reads them; each layer's mask is drawn once.
            begin: Position of the chunk's first step.
            seed, index: See :func:`econmt_ops.products.dropout.keep_mask`.
        """
        if seed is None:
            return values
        if self._variational and values.device.type != "cpu":
            # A GPU kernel generates the mask while it reads the values.
            return dropout(values, self._probability, seed, variational=True, index=index)
        if layer not in self._masks:
            shape = (len(values), 1 if self._variational else self._steps, values.shape[2])
            self._masks[layer] = keep_mask(shape, self._probability, seed, values.device, index)
        mask = self._masks[layer]
        if not self._variational:
            mask = mask[:, begin : begin + values.shape[1]]
        return apply_dropout(values, mask, self._probability)
