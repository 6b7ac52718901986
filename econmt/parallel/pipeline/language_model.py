"""A language model's step as parts on several ranks: its layers over chunks of the window.

Shapes: B rows, T tokens per row, C tokens per chunk, L layers, H hidden size, E embedding size, D output layer input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.text_batches import TextBatch
from econmt.model import Implementations
from econmt.model.language_model import LanguageModel, Seeds
from econmt.model.layers import LSTMLayer
from econmt.parallel.pipeline.dropout import ChunkedDropout
from econmt.parallel.pipeline.embedding import LookUp, reader
from econmt.parallel.pipeline.plan import Like, Output, PipelinePart
from econmt.parallel.pipeline.step import Divided
from econmt_ops.core.precision import compute_dtype
from econmt_ops.lstm.chunked import ChunkedLSTM


class LanguageModelParts:
    """Parts of a window's forward pass; every rank lists all of them in the same order.

    The embedding is on the rank of the bottom layer, dropout of the top layer's outputs on that of the top layer. Each
    layer's state is passed from chunk to chunk, and stored in the model after the last one, see
    :attr:`econmt.model.language_model.LanguageModel.carried`.

    Args:
        model: Model in training mode, with the values of this rank's parameters.
        batch: Window of text, on the device.
        homes: Rank of every layer, bottom first.
        length: C; the last chunk may be shorter.
        implementations: Implementations of the ops.

    Attributes:
        parts: Parts of all ranks.
        hidden: Output that the output layer reads, (B, T, D).
        like: Shape and type of that output.
        targets: Target tokens, (B, T).
        look_ups: Look-ups of the inputs, if the embedding is tied to the output layer.
    """

    def __init__(
        self,
        model: LanguageModel,
        batch: TextBatch,
        homes: Sequence[int],
        length: int,
        implementations: Implementations,
    ) -> None:
        self._model, self._batch, self._length = model, batch, length
        self._op_options = implementations.recurrent("encoder")
        self._seeds: Seeds = model.draw_seeds()
        self._carried = model.state_buffer(len(batch.rows))
        weight = model.embedding.weight
        self._dtype = compute_dtype(weight)
        self.targets = batch.targets
        rows, steps = batch.inputs.shape
        self._drop = ChunkedDropout(model.between, model.config.dropouts.variational, steps)
        sizes = [min(length, steps - begin) for begin in range(0, steps, length)]
        self.look_ups: list[LookUp] = []
        self._read = reader(model.embedding, model.output.weight, batch.inputs, homes[0], self.look_ups)
        self.parts: list[PipelinePart] = [PipelinePart(homes[0], self._embed, layer="embedding")]
        self._layers: dict[int, ChunkedLSTM] = {}
        for layer, home in enumerate(homes):
            begin, end = self._weights(layer)
            self.parts.append(PipelinePart(home, begin, layer="decoder", after=end))
        states: list[tuple[Output, ...]] = [()] * len(homes)
        tops: list[Output] = []
        for chunk, size in enumerate(sizes):
            below: Output = (0, chunk)
            for layer, home in enumerate(homes):
                number = len(self.parts)
                run = self._layer(layer, chunk, last=chunk == len(sizes) - 1)
                like = Like((rows, size, model.config.size), self._dtype)
                self.parts.append(PipelinePart(home, run, (below, *states[layer]), (like,), "decoder"))
                below, states[layer] = (number, 0), ((number, 1), (number, 2))
            tops.append(below)
        self.hidden: Output = (len(self.parts), 0)
        self.like = Like((rows, steps, model.output.in_features), self._dtype)
        self.parts.append(PipelinePart(homes[-1], self._read_out, tuple(tops), (self.like,), "output"))

    def _embed(self) -> Sequence[Tensor]:
        dropped = self._model.drop_inputs(self._read(), self._batch.inputs, self._seeds)
        return torch.split(dropped, self._length, 1)

    def _weights(self, layer: int) -> tuple[Callable[[], Sequence[Tensor]], Callable[[], None]]:
        """Returns functions that prepare a layer's weights, masked once for all chunks, and finish their gradients."""

        def begin() -> Sequence[Tensor]:
            parameters = self._model.layers[layer]
            assert isinstance(parameters, LSTMLayer)
            drops = self._seeds.weights[layer] is not None
            weights = self._model.weights_of(layer, self._seeds) if drops else parameters.weights
            self._layers[layer] = ChunkedLSTM(weights)
            return ()

        return begin, lambda: self._layers[layer].backward()

    def _layer(self, layer: int, chunk: int, *, last: bool) -> Callable[..., Sequence[Tensor]]:
        """Returns a function that runs a layer on a chunk: outputs (B, C, H), h and c (B, H)."""
        seed = self._seeds.layers if layer else None

        def run(below: Tensor, *state: Tensor) -> Sequence[Tensor]:
            if not state:
                rows, carries = self._batch.rows, self._batch.carries
                begin = self._carried[:, layer].index_select(1, rows) * carries[:, None].to(
                    self._carried.dtype
                )
                state = tuple(begin.unbind(0))
            read = self._drop(below, layer, chunk * self._length, seed, layer)
            outputs, (h, c) = self._layers[layer](read, (state[0], state[1]), **self._op_options)
            if last:
                with torch.no_grad():
                    for number, part in enumerate((h, c)):
                        self._carried[number, layer].index_copy_(
                            0, self._batch.rows, part.to(self._carried.dtype)
                        )
            return outputs, h, c

        return run

    def _read_out(self, *outputs: Tensor) -> Sequence[Tensor]:
        return (self._model.read_out(torch.cat(outputs, 1), self._seeds).to(self._dtype),)


def divide_language_model(model: LanguageModel, homes: Sequence[int], chunks: int) -> Divided:
    """Divides a language model over the stages.

    Args:
        model: Model of any rank.
        homes: Stage of every layer, bottom first, ascending from 0.
        chunks: Number of chunks of a window.
    """
    stages = {f"layers.{layer}": home for layer, home in enumerate(homes)}
    stages |= {"embedding": homes[0], "readout": homes[-1], "output": -1}
    if model.output.weight is model.embedding.weight:
        stages["embedding"] = -1

    def home(name: str) -> int:
        return next(stage for prefix, stage in stages.items() if name.startswith(prefix + "."))

    def parts(batch: AnyBatch, implementations: Implementations) -> LanguageModelParts:
        assert isinstance(batch, TextBatch)
        length = -(-batch.inputs.shape[1] // chunks)
        return LanguageModelParts(model, batch, homes, length, implementations)

    def carried() -> list[tuple[Tensor, int, Sequence[int]]]:
        return [(model.carried, 1, homes)]

    names = [name for name, _ in model.named_parameters()]
    return Divided({name: home(name) for name in names}, model.output, model.pad, parts, carried)
