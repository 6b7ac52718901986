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
from econmt.parallel.pipeline.embedding import reader
from econmt.parallel.pipeline.parts import ChunkedDropout, Chunks, Parts
from econmt.parallel.pipeline.plan import Like, Output
from econmt.parallel.pipeline.step import Divided
from econmt_ops.core.precision import compute_dtype
from econmt_ops.core.weights import AnyLSTMWeights


class LanguageModelParts(Parts):
    """Parts of a window's forward pass by a model in training mode with the values of this rank's parameters.

    The embedding is on the rank of the bottom layer, dropout of the top layer's outputs on that of the top layer.
    ``homes`` are the ranks of the layers, bottom first. Each layer's state is passed from chunk to chunk, and stored in
    the model after the last one, see :attr:`econmt.model.language_model.LanguageModel.carried`.
    """

    def __init__(
        self,
        model: LanguageModel,
        batch: TextBatch,
        homes: Sequence[int],
        chunks: int,
        implementations: Implementations,
    ) -> None:
        super().__init__(batch.targets)
        rows, steps = batch.inputs.shape
        self._model, self._batch, self._chunks = model, batch, Chunks(steps, chunks)
        self._op_options = implementations.recurrent("encoder")
        self._seeds: Seeds = model.draw_seeds()
        self._carried = model.state_buffer(len(batch.rows))
        self._dtype = compute_dtype(model.embedding.weight)
        self._drop = ChunkedDropout(model.between, model.config.dropouts.variational, steps)
        self._read = reader(model.embedding, model.output.weight, batch.inputs, homes[0], self.look_ups)
        embedding = self.add(homes[0], self._embed, layer="embedding")
        self._layers = self.add_stack(homes, self._weights, "decoder")
        states: list[tuple[Output, ...]] = [()] * len(homes)
        tops: list[Output] = []
        for chunk, size in enumerate(self._chunks.sizes):
            below: Output = (embedding, chunk)
            for layer, home in enumerate(homes):
                run = self._layer(layer, chunk)
                like = Like((rows, size, model.sizes[layer]), self._dtype)
                number = self.add(home, run, (below, *states[layer]), [like])
                below, states[layer] = (number, 0), ((number, 1), (number, 2))
            tops.append(below)
        self.like = Like((rows, steps, model.output.in_features), self._dtype)
        self.hidden = self.add(homes[-1], self._read_out, tops, [self.like], "output"), 0

    def _embed(self) -> Sequence[Tensor]:
        dropped = self._model.drop_inputs(self._read(), self._batch.inputs, self._seeds)
        return torch.split(dropped, self._chunks.length, 1)

    def _weights(self, layer: int) -> AnyLSTMWeights:
        """Returns a layer's weights, with dropout for all chunks."""
        weights: AnyLSTMWeights = self._model.weights_of(layer, self._seeds)
        return weights

    def _layer(self, layer: int, chunk: int) -> Callable[..., Sequence[Tensor]]:
        """Returns a function that runs a layer on a chunk: outputs (B, C, H), h and c (B, H)."""
        seed = self._seeds.layers if layer else None

        def run(below: Tensor, *state: Tensor) -> Sequence[Tensor]:
            if not state:
                rows, carries = self._batch.rows, self._batch.carries
                begin = self._carried[:, layer].index_select(1, rows) * carries[:, None].to(
                    self._carried.dtype
                )
                state = tuple(begin[..., : self._model.sizes[layer]].unbind(0))
            read = self._drop(below, layer, self._chunks.begin(chunk), seed, layer)
            outputs, (h, c) = self._layers[layer](read, (state[0], state[1]), **self._op_options)
            if chunk == len(self._chunks.sizes) - 1:
                with torch.no_grad():
                    for number, part in enumerate((h, c)):
                        carried = self._carried[number, layer, :, : part.shape[1]]
                        carried.index_copy_(0, self._batch.rows, part.to(carried.dtype))
            return outputs, h, c

        return run

    def _read_out(self, *outputs: Tensor) -> Sequence[Tensor]:
        dropped = self._model.drop_outputs(torch.cat(outputs, 1), self._seeds)
        return (self._model.read_out(dropped).to(self._dtype),)


def divide_language_model(model: LanguageModel, homes: Sequence[int], chunks: int) -> Divided:
    """Divides a language model over the stages; ``homes`` are those of the layers, bottom first, ascending from 0."""
    stages = {f"layers.{layer}": home for layer, home in enumerate(homes)}
    stages |= {"embedding": homes[0], "readout": homes[-1], "output": -1}
    if model.output.weight is model.embedding.weight:
        stages["embedding"] = -1

    def home(name: str) -> int:
        return next(stage for prefix, stage in stages.items() if name.startswith(prefix + "."))

    def parts(batch: AnyBatch, implementations: Implementations) -> LanguageModelParts:
        assert isinstance(batch, TextBatch)
        return LanguageModelParts(model, batch, homes, chunks, implementations)

    def carried() -> list[tuple[Tensor, int, Sequence[int]]]:
        return [(model.carried, 1, homes)]

    names = [name for name, _ in model.named_parameters()]
    return Divided({name: home(name) for name in names}, model.output, model.pad, parts, carried)
