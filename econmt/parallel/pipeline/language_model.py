"""A language model's step as parts on several ranks: its layers over chunks of the window.

Shapes: B rows, T tokens of each, C of a chunk, L layers, H their width, E the embedding's, D width of the output layer.
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
    """The parts of a window's forward pass; every rank lists all of them, in the same order.

    The embedding is on the rank of the bottom layer, dropout of the top layer's outputs on that of the top one. Each
    layer's state goes from chunk to chunk, and that after the last one into the model, see
    :attr:`econmt.model.language_model.LanguageModel.carried`.

    Args:
        model: in training mode, with the values of this rank's parameters.
        batch: the window, on the device.
        homes: the rank of every layer, bottom first.
        length: C; the last chunk may be shorter.
        implementations: of the ops.

    Attributes:
        parts: see above.
        hidden: the output that the output layer reads, (B, T, D).
        like: what it looks like.
        targets: (B, T).
        look_ups: of the inputs, where the embedding is tied to the output layer.
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
        self._how = implementations.for_encoder()
        self._seeds: Seeds = model.draw_seeds()
        self._place = model.place(len(batch.rows))
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
        """A layer's weights, with one mask for all chunks, and their gradients after all chunks."""

        def begin() -> Sequence[Tensor]:
            parameters = self._model.layers[layer]
            assert isinstance(parameters, LSTMLayer)
            drops = self._seeds.weights[layer] is not None
            weights = self._model.weights_of(layer, self._seeds) if drops else parameters.weights
            self._layers[layer] = ChunkedLSTM(weights)
            return ()

        return begin, lambda: self._layers[layer].backward()

    def _layer(self, layer: int, chunk: int, *, last: bool) -> Callable[..., Sequence[Tensor]]:
        """A layer at a chunk: outputs (B, C, H), h and c (B, H)."""
        seed = self._seeds.layers if layer else None

        def run(below: Tensor, *state: Tensor) -> Sequence[Tensor]:
            if not state:
                rows, carries = self._batch.rows, self._batch.carries
                begin = self._place[:, layer].index_select(1, rows) * carries[:, None].to(self._place.dtype)
                state = tuple(begin.unbind(0))
            read = self._drop(below, layer, chunk * self._length, seed, layer)
            outputs, (h, c) = self._layers[layer](read, (state[0], state[1]), **self._how)
            if last:
                with torch.no_grad():
                    for number, part in enumerate((h, c)):
                        self._place[number, layer].index_copy_(
                            0, self._batch.rows, part.to(self._place.dtype)
                        )
            return outputs, h, c

        return run

    def _read_out(self, *outputs: Tensor) -> Sequence[Tensor]:
        return (self._model.read_out(torch.cat(outputs, 1), self._seeds).to(self._dtype),)


def divide_language_model(model: LanguageModel, homes: Sequence[int], chunks: int) -> Divided:
    """A language model over the stages.

    Args:
        model: of any rank.
        homes: the stage of every layer, bottom first, rising from 0.
        chunks: into how many a window is cut.
    """
    places = {f"layers.{layer}": home for layer, home in enumerate(homes)}
    places |= {"embedding": homes[0], "readout": homes[-1], "output": -1}
    if model.output.weight is model.embedding.weight:
        places["embedding"] = -1

    def home(name: str) -> int:
        return next(there for place, there in places.items() if name.startswith(place + "."))

    def parts(batch: AnyBatch, implementations: Implementations) -> LanguageModelParts:
        assert isinstance(batch, TextBatch)
        length = -(-batch.inputs.shape[1] // chunks)
        return LanguageModelParts(model, batch, homes, length, implementations)

    def carried() -> list[tuple[Tensor, int, Sequence[int]]]:
        return [(model.carried, 1, homes)]

    names = [name for name, _ in model.named_parameters()]
    return Divided({name: home(name) for name in names}, model.output, model.pad, parts, carried)
