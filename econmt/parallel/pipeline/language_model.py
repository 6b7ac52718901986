"""A language model's step as parts on several ranks: its layers over chunks of the window.

Shapes: B rows, T tokens per row, C tokens per chunk, L layers, H hidden size, E embedding size, D output layer input.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.text_batches import TextBatch
from econmt.model import Implementations
from econmt.model.language_model import LanguageModel
from econmt.parallel.pipeline.partition import PipelinePlan
from econmt.parallel.pipeline.parts import ChunkedStack, Chunks, Parts
from econmt.parallel.pipeline.step import Divided
from econmt_ops.core.precision import compute_dtype


def divide_language_model(model: LanguageModel, plan: PipelinePlan) -> Divided:
    """Divides a language model over the stages; those of its layers ascend from 0."""
    (homes,), (chunks,) = plan.homes, plan.chunks
    stages = {f"layers.{layer}": home for layer, home in enumerate(homes)}
    stages |= {"embedding": homes[0], "readout": homes[-1], "output": -1}

    def parts(batch: AnyBatch, implementations: Implementations) -> Parts:
        assert isinstance(batch, TextBatch)
        return _parts(model, batch, homes, chunks, implementations)

    return Divided.of(model, stages, parts, homes)


def _parts(
    model: LanguageModel,
    batch: TextBatch,
    homes: Sequence[int],
    chunks: int,
    implementations: Implementations,
) -> Parts:
    """Returns the parts of a window's forward pass by a model in training mode.

    The embedding is on the rank of the bottom layer, dropout of the top layer's outputs on that of the top layer. Each
    layer's state is passed from chunk to chunk, and stored in the model after the last one, see
    :attr:`econmt.model.language_model.LanguageModel.carried`.
    """
    made = Parts(batch.targets, compute_dtype(model.embedding.weight))
    seeds, how, ids = model.draw_seeds(), implementations.recurrent("encoder"), batch.inputs
    cuts, variational = Chunks(ids.shape[1], chunks), model.config.dropouts.variational

    def drop(embedded: Tensor) -> Tensor:
        return model.drop_inputs(embedded, ids, seeds)

    def read_state(layer: slice) -> Sequence[Tensor]:
        return model.read_states(batch.rows, batch.carries, layer)[0]

    def write_state(layer: slice, *state: Tensor) -> Sequence[Tensor]:
        model.write_states(batch.rows, (state,), layer)
        return ()

    def read_out(*outputs: Tensor) -> Sequence[Tensor]:
        dropped = model.drop_outputs(torch.cat(outputs, 1), seeds)
        return (model.read_out(dropped).to(made.dtype),)

    layers = [(slice(layer, layer + 1), home) for layer, home in enumerate(homes)]
    embedded = made.add_embedding(model.embedding, model.output.weight, ids, cuts, drop)
    first = [made.add(home, partial(read_state, layer)) for layer, home in layers]
    stack = ChunkedStack(
        model.stages(seeds), homes, cuts, model.between, variational, "decoder", lambda _: how
    )
    tops, last = made.add_stack(stack, embedded, [[(number, 0), (number, 1)] for number in first])
    for (layer, home), state in zip(layers, last, strict=True):
        made.add(home, partial(write_state, layer), state)
    like = made.like(cuts.steps, model.output.in_features)
    made.hidden = made.add(homes[-1], read_out, tops, [like], "output"), 0
    return made
