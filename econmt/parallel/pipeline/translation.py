"""A translation model's step as parts on several ranks: layers of encoder and decoder over chunks of time.

Both stacks are divided over all ranks, one after the other, since a decoder needs the whole source: a wavefront over
the source, then one over the target. A bidirectional layer cannot be cut in time, but its two directions may be on two
ranks. A decoder without input feeding attends to the source from its bottom layer, chunk by chunk. With input feeding
each step depends on the attention of the step before, so that the decoder is one part; the encoder's layers and the
output layer are still divided (Ono et al., 2019, divide recurrences by model and the softmax by data).

Shapes: B rows, S source positions, T target positions, C of a chunk, I embedding, E encoder, H decoder, D output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.batches import Batch
from econmt.model import Implementations, TranslationModel
from econmt.model.decoder import Memory, ParallelDecoder
from econmt.model.layers import LSTMLayer, SeededDropout
from econmt.parallel.pipeline.embedding import reader
from econmt.parallel.pipeline.parts import ChunkedDropout, Chunks, Parts
from econmt.parallel.pipeline.plan import Like, Output
from econmt.parallel.pipeline.step import Divided
from econmt_ops.core.precision import compute_dtype
from econmt_ops.core.weights import AnyLSTMWeights
from econmt_ops.lstm.chunked import ChunkedLSTM
from econmt_ops.products.dropout import Seed


class StagePlacement(NamedTuple):
    """Pipeline stages of a translation model's layers, each list bottom first and ascending.

    Attributes:
        pairs: Stages of the forward and the backward direction of the bidirectional layers.
        upper: Stages of the encoder's other layers.
        decoder: Stages of the decoder's layers; all equal with input feeding.
        source_chunks, target_chunks: Number of chunks of each side.
    """

    pairs: tuple[tuple[int, int], ...]
    upper: tuple[int, ...]
    decoder: tuple[int, ...]
    source_chunks: int
    target_chunks: int


class TranslationParts(Parts):
    """Parts of a batch's forward pass by a model in training mode with the values of this rank's parameters."""

    def __init__(
        self, model: TranslationModel, batch: Batch, homes: StagePlacement, implementations: Implementations
    ) -> None:
        super().__init__(batch.target_output)
        self._model, self._batch, self._homes, self._implementations = model, batch, homes, implementations
        self._source_seed = model.source_dropout.draw()
        self._encoder_seeds = model.encoder.draw_seeds()
        self._target_seed = model.target_dropout.draw()
        self._decoder_seeds = model.decoder.draw_seeds()
        self._output_seed = model.output_dropout.draw()
        self._embedding_dtype = model.source_embedding.weight.dtype
        self._dtype = compute_dtype(model.source_embedding.weight)
        (self._rows, source), target = batch.source.shape, batch.target_input.shape[1]
        self._source = Chunks(source, homes.source_chunks)
        self._target = Chunks(target, homes.target_chunks)
        drops = model.encoder.dropout, model.decoder.dropout
        self._drop_source, self._drop_target = (
            ChunkedDropout(drop.probability, drop.variational, steps)
            for drop, steps in zip(drops, (source, target), strict=True)
        )
        tops, last = self._encode()
        fed = not isinstance(model.decoder, ParallelDecoder)
        self.like = Like((self._rows, target, model.output.in_features), self._dtype)
        self.hidden = self._decode_at_once(tops, last) if fed else self._decode(tops, last)

    def _like(self, *shape: int) -> Like:
        return Like((self._rows, *shape), self._dtype)

    def _embed(
        self,
        table: nn.Embedding,
        ids: Tensor,
        dropout: SeededDropout,
        seed: Seed | None,
        cuts: Chunks,
    ) -> list[Output]:
        """Adds the embedding of one side; returns its output for every chunk."""
        read = reader(table, self._model.output.weight, ids, 0, self.look_ups)

        def embed() -> Sequence[Tensor]:
            return torch.split(dropout(read(), seed), cuts.length, 1)

        like = [Like((self._rows, size, table.embedding_dim), self._embedding_dtype) for size in cuts.sizes]
        number = self.add(0, embed, (), like, "embedding")
        return [(number, chunk) for chunk in range(len(like))]

    def _encode(self) -> tuple[list[list[Output]], list[Output]]:
        """Adds the encoder; returns the top layer's outputs for every chunk, and its last states."""
        model = self._model
        pairs = self._homes.pairs
        cuts = Chunks(self._source.steps, 1) if pairs else self._source

        embedded = self._embed(
            model.source_embedding, self._batch.source, model.source_dropout, self._source_seed, cuts
        )
        current: list[list[Output]] = [[chunk_output] for chunk_output in embedded]
        last: list[Output] = []
        for layer, both in enumerate(pairs):
            half = model.encoder.config.size // 2
            following = [self._direction(layer, way, rank, current, half) for way, rank in enumerate(both)]
            chunks = len(self._source.sizes)
            current = [[(number, chunk) for number in following] for chunk in range(chunks)]
            last = [(number, chunks) for number in following]
        if self._homes.upper:
            current, last = self._encode_one_way(current)
        return current, last

    def _direction(self, layer: int, way: int, rank: int, below: list[list[Output]], half: int) -> int:
        """Adds one direction of a bidirectional layer over the whole source; its outputs are chunks and its last h."""
        encoder = self._model.encoder
        layers = encoder.backward_layers if way else encoder.forward_layers
        seed = self._encoder_seeds.below[layer - 1] if layer else None

        def run(*inputs: Tensor) -> Sequence[Tensor]:
            read = _joined(inputs, len(below))
            if layer:
                read = encoder.dropout(read, seed)
            outputs, ((h, _),) = encoder.cell.run(
                read,
                (_weights(layers[layer]),),
                self._implementations.recurrent("encoder"),
                lengths=self._batch.source_lengths,
                reverse=bool(way),
            )
            if layer and encoder.config.residual:
                outputs = outputs + read[:, :, way * half : (way + 1) * half]
            return *torch.split(outputs, self._source.length, 1), h

        likes = [self._like(size, half) for size in self._source.sizes]
        outputs = [*likes, self._like(half)]
        return self.add(rank, run, [*chain.from_iterable(below)], outputs, "encoder")

    def _encode_one_way(self, below: list[list[Output]]) -> tuple[list[list[Output]], list[Output]]:
        """Adds the unidirectional layers chunk by chunk, from the end of the source if it is read in reverse."""
        encoder, homes = self._model.encoder, self._homes.upper
        stack = self.add_stack(homes, lambda layer: _weights(encoder.upper_layers[layer]), "encoder")
        order = list(range(len(self._source.sizes)))
        if encoder.config.reverse_input:
            order.reverse()
        states: list[list[Output]] = [[] for _ in homes]
        tops: list[list[Output]] = [[] for _ in order]
        for chunk in order:
            current = below[chunk]
            for layer, home in enumerate(homes):
                run = self._encoder_layer(stack, layer, chunk, len(current))
                like = self._like(self._source.sizes[chunk], encoder.config.size)
                outputs = [like, self._like(like.shape[2])]
                number = self.add(home, run, [*current, *states[layer]], outputs, "encoder")
                current, states[layer] = [(number, 0)], [(number, 1), (number, 2)]
            tops[chunk] = current
        return tops, states[-1][:1]

    def _encoder_layer(
        self, stack: dict[int, ChunkedLSTM], layer: int, chunk: int, count: int
    ) -> Callable[..., Sequence[Tensor]]:
        """Returns a function that runs a unidirectional layer on a chunk of ``count`` concatenated inputs."""
        encoder = self._model.encoder
        begin = self._source.begin(chunk)
        seed, index = self._mask_below(layer)
        adds = encoder.config.residual and (layer > 0 or encoder.residual_from_bottom)

        def run(*inputs: Tensor) -> Sequence[Tensor]:
            read = self._drop_source(_joined(inputs[:count], 1), layer, begin, seed, index)
            state = inputs[count:]
            outputs, (h, c) = stack[layer](
                read,
                (state[0], state[1]) if state else None,
                lengths=(self._batch.source_lengths - begin).clamp(0, read.shape[1]),
                reverse=encoder.config.reverse_input,
                **self._implementations.recurrent("encoder"),
            )
            return (outputs + read if adds else outputs), h, c

        return run

    def _mask_below(self, layer: int) -> tuple[Seed | None, int]:
        """Returns seed and index of the dropout mask on the input of a unidirectional encoder layer."""
        encoder, seeds = self._model.encoder, self._encoder_seeds
        pairs = len(encoder.forward_layers)
        if pairs and (layer == 0 or encoder.residual_from_bottom):
            return seeds.below[pairs - 1 + layer], -1
        return (seeds.stack, layer) if layer else (None, -1)

    def _memory(self, chunks: int, inputs: tuple[Tensor, ...], count: int) -> tuple[Memory, Tensor]:
        """Returns the decoder's memory of the source and its summary; the last ``count`` inputs are last states."""
        encoder = self._model.encoder
        chunk_outputs, last_states = inputs[: len(inputs) - count], inputs[len(inputs) - count :]
        values = encoder.dropout(_joined(chunk_outputs, chunks), self._encoder_seeds.output)
        encoded = self._model.encoded(values, torch.cat(last_states, -1), self._batch.source_lengths)
        return encoded.memory, encoded.summary

    def _embed_target(self) -> list[Output]:
        """Adds the target's embedding; returns its output for every chunk."""
        model, batch = self._model, self._batch
        return self._embed(
            model.target_embedding, batch.target_input, model.target_dropout, self._target_seed, self._target
        )

    def _decode_at_once(self, tops: list[list[Output]], last: list[Output]) -> Output:
        """Adds the decoder with input feeding as one part; returns the output layer's input."""
        model, targets = self._model, self._embed_target()

        def run(*inputs: Tensor) -> Sequence[Tensor]:
            embedded = torch.cat(inputs[: len(targets)], 1)
            memory, summary = self._memory(len(tops), inputs[len(targets) :], len(last))
            state = model.decoder.initial_state(summary)
            outputs, _, _ = model.decoder(embedded, memory, state, self._implementations, self._decoder_seeds)
            return (model.read_out(outputs, self._output_seed).to(self._dtype),)

        return self.add(
            self._homes.decoder[0], run, [*targets, *chain.from_iterable(tops), *last], [self.like]
        ), 0

    def _decode(self, tops: list[list[Output]], last: list[Output]) -> Output:
        """Adds the decoder without input feeding, chunk by chunk; returns the output layer's input."""
        model, homes = self._model, self._homes.decoder
        size, width = model.config.decoder.size, model.config.encoder.size

        def make_memory(*inputs: Tensor) -> Sequence[Tensor]:
            memory, summary = self._memory(len(tops), inputs, len(last))
            state = model.decoder.initial_state(summary)
            parts = [
                part.to(self._dtype) if not index else part
                for pair in state.layers
                for index, part in enumerate(pair)
            ]
            return memory.keys, memory.values, *parts

        stack = self.add_stack(homes, lambda layer: _weights(model.decoder.layers[layer]), "decoder")
        exact = torch.promote_types(self._dtype, torch.float32)
        begin = [self._like(size), Like((self._rows, size), exact)] * len(homes)
        nothing = self._like(0)  # keys and values stay on the bottom layer's rank
        memory = self.add(
            homes[0],
            make_memory,
            [*chain.from_iterable(tops), *last],
            [nothing, nothing, *begin],
            "attention",
        )
        states: list[list[Output]] = [
            [(memory, 2 + 2 * layer), (memory, 3 + 2 * layer)] for layer in range(len(homes))
        ]
        outputs, contexts = [], []
        for chunk, target in enumerate(self._embed_target()):
            steps = self._target.sizes[chunk]
            current, context = [target], None
            for layer, home in enumerate(homes):
                run = self._decoder_layer(stack, layer, chunk)
                number = self.add(home, run, [*current, *states[layer]], [self._like(steps, size)])
                states[layer] = [(number, 1), (number, 2)]
                if context is None:
                    attended: list[Output] = [(number, 0), (memory, 0), (memory, 1)]
                    like = self._like(steps, width)
                    context = (self.add(home, self._attend, attended, [like], "attention"), 0)
                    contexts.append(context)
                current = [(number, 0), context]
            outputs.append(current[0])

        def combine(*inputs: Tensor) -> Sequence[Tensor]:
            assert isinstance(model.decoder, ParallelDecoder)
            hidden, attended = torch.cat(inputs[: len(outputs)], 1), torch.cat(inputs[len(outputs) :], 1)
            return (
                model.read_out(model.decoder.combined(hidden, attended), self._output_seed).to(self._dtype),
            )

        return self.add(homes[-1], combine, [*outputs, *contexts], [self.like]), 0

    def _attend(self, states: Tensor, keys: Tensor, values: Tensor) -> Sequence[Tensor]:
        """Computes the contexts (B, C, E) for the bottom layer's outputs (B, C, H)."""
        assert isinstance(self._model.decoder, ParallelDecoder)
        memory = Memory(keys, values, self._batch.source_lengths)
        return self._model.decoder.attend(states, memory, self._implementations)[:1]

    def _decoder_layer(
        self, stack: dict[int, ChunkedLSTM], layer: int, chunk: int
    ) -> Callable[..., Sequence[Tensor]]:
        """Returns a function that runs a decoder layer on a chunk; it gives outputs, h and c."""
        decoder = self._model.decoder
        assert isinstance(decoder, ParallelDecoder)
        seed = self._decoder_seeds[layer - 1] if layer else None
        how = self._implementations.recurrent("decoder")

        def run(below: Tensor, *context_and_state: Tensor) -> Sequence[Tensor]:
            *context, h, c = context_and_state
            read = self._drop_target(below, layer, self._target.begin(chunk), seed)
            recurrence: Callable[[Tensor], Any] = partial(stack[layer], state=(h, c), **how)
            outputs, (h, c) = decoder.run_upper(read, context[0], recurrence) if layer else recurrence(read)
            return outputs, h, c

        return run


def _joined(inputs: tuple[Tensor, ...], chunks: int) -> Tensor:
    """Concatenates tensors in chunk order: those of a chunk along features, then the chunks along time."""
    width = len(inputs) // chunks
    parts = [torch.cat(inputs[begin : begin + width], -1) for begin in range(0, len(inputs), width)]
    return torch.cat(parts, 1)


def _weights(layer: object) -> AnyLSTMWeights:
    """Returns the parameters of a layer in the form that an op takes."""
    assert isinstance(layer, LSTMLayer)
    return layer.weights


def divide_translation(model: TranslationModel, homes: StagePlacement) -> Divided:
    """Divides a translation model over the stages."""
    encoder = {f"encoder.upper_layers.{layer}": home for layer, home in enumerate(homes.upper)}
    for layer, (forward, backward) in enumerate(homes.pairs):
        encoder |= {f"encoder.forward_layers.{layer}": forward, f"encoder.backward_layers.{layer}": backward}
    decoder = {f"decoder.layers.{layer}": home for layer, home in enumerate(homes.decoder)}
    others = {
        "source_embedding": 0,
        "target_embedding": 0,
        "decoder.attention": homes.decoder[0],
        "decoder.start": homes.decoder[0],
        "decoder.combine": homes.decoder[-1],
        "readout": homes.decoder[-1],
        "output": -1,
    }
    stages = {**encoder, **decoder, **others}

    def home(name: str, parameter: Tensor) -> int:
        if parameter is model.output.weight:
            return -1
        return next(stage for prefix, stage in stages.items() if name.startswith(prefix + "."))

    def parts(batch: AnyBatch, implementations: Implementations) -> TranslationParts:
        assert isinstance(batch, Batch)
        return TranslationParts(model, batch, homes, implementations)

    parameter_stages = {name: home(name, parameter) for name, parameter in model.named_parameters()}
    return Divided(parameter_stages, model.output, model.pad, parts, list)
