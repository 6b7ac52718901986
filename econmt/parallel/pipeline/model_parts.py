"""Steps of translation and language models as parts on several ranks: layers over chunks of time.

A language model has one stack, which reads the window. Both stacks of a translation model are divided over all ranks,
one after the other, since a decoder needs the whole source: a wavefront over the source, then one over the target. A
bidirectional layer cannot be cut in time, but its two directions may be on two ranks. A decoder without input feeding
attends to the source from its bottom layer, chunk by chunk. With input feeding each step depends on the attention of
the step before, so that the decoder is one part; the encoder's layers and the output layer are still divided (Ono et
al., 2019, divide recurrences by model and the softmax by data).

Shapes: B rows, S source positions, T target positions, C of a chunk, I embedding, E encoder, H decoder, D output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.batches import Batch
from econmt.data.batching.text_batches import TextBatch
from econmt.model import Implementations, TranslationModel
from econmt.model.decoder import Memory, ParallelDecoder
from econmt.model.language_model import LanguageModel
from econmt.model.layers import RecurrentLayer
from econmt.parallel.pipeline.partition import PipelinePlan
from econmt.parallel.pipeline.parts import ChunkedStack, Chunks, Parts, joined
from econmt.parallel.pipeline.plan import Like, Output
from econmt.parallel.pipeline.step import Divided
from econmt_ops import AttentionalLSTMState
from econmt_ops.core.precision import compute_dtype


class TranslationParts(Parts):
    """Parts of a batch's forward pass by a model in training mode with the values of this rank's parameters."""

    def __init__(
        self, model: TranslationModel, plan: PipelinePlan, batch: AnyBatch, implementations: Implementations
    ) -> None:
        assert isinstance(batch, Batch)
        super().__init__(batch.target_output, compute_dtype(model.source_embedding.weight))
        self._model, self._batch, self._implementations = model, batch, implementations
        both, self._upper, self._homes = plan.homes
        self._pairs = list(zip(both[::2], both[1::2], strict=True))
        source_seed, self._encoder_seeds = model.source_dropout.draw(), model.encoder.draw_seeds()
        self._target_seed, self._decoder_seeds = model.target_dropout.draw(), model.decoder.draw_seeds()
        self._output_seed = model.output_dropout.draw()
        sizes = batch.source.shape[1], batch.target_input.shape[1]
        self._source, self._target = map(Chunks, sizes, plan.chunks)
        embedded = self.add_embedding(
            model.source_embedding,
            model.output.weight,
            batch.source,
            Chunks(self._source.steps, 1) if self._pairs else self._source,
            lambda read: model.source_dropout(read, source_seed),
        )
        tops, last = self._encode(embedded)
        fed = not isinstance(model.decoder, ParallelDecoder)
        self.hidden = (self._decode_at_once(tops, last) if fed else self._decode(tops, last)), 0

    def _encode(self, embedded: list[list[Output]]) -> tuple[list[Output], list[Output]]:
        """Adds the encoder; returns the top layer's outputs in the order of the chunks, and its last states."""
        encoder, current = self._model.encoder, embedded
        last: list[Output] = []
        for layer, both in enumerate(self._pairs):
            following = [self._direction(layer, way, rank, current) for way, rank in enumerate(both)]
            chunks = len(self._source.sizes)
            current = [[(number, chunk) for number in following] for chunk in range(chunks)]
            last = [(number, chunks) for number in following]
        if not self._upper:
            return [*chain.from_iterable(current)], last
        options = {**self._implementations.recurrent("encoder"), "reverse": encoder.config.reverse_input}

        def at(begin: int) -> dict[str, Any]:
            lengths = (self._batch.source_lengths - begin).clamp(0, self._source.length)
            return {**options, "lengths": lengths}

        stack = ChunkedStack(
            encoder.stages(self._encoder_seeds),
            self._upper,
            self._source,
            encoder.dropout.probability,
            encoder.dropout.variational,
            "encoder",
            at,
            reverse=encoder.config.reverse_input,
        )
        tops, states = self.add_stack(stack, current)
        return tops, [states[-1][0]]

    def _direction(self, layer: int, way: int, rank: int, below: list[list[Output]]) -> int:
        """Adds one direction of a bidirectional layer over the whole source; its outputs are chunks and its last h."""
        encoder, half = self._model.encoder, self._model.encoder.config.size // 2
        layer_of_way = (encoder.backward_layers if way else encoder.forward_layers)[layer]
        assert isinstance(layer_of_way, RecurrentLayer)
        seed = self._encoder_seeds.below[layer - 1] if layer else None

        def run(*inputs: Tensor) -> Sequence[Tensor]:
            read = joined(inputs, len(below))
            if layer:
                read = encoder.dropout(read, seed)
            outputs, ((h, _),) = encoder.cell.run(
                read,
                (layer_of_way.weights,),
                self._implementations.recurrent("encoder"),
                lengths=self._batch.source_lengths,
                reverse=bool(way),
            )
            if layer and encoder.config.residual:
                outputs = outputs + read[:, :, way * half : (way + 1) * half]
            return *torch.split(outputs, self._source.length, 1), h

        likes = [*(self.like(size, half) for size in self._source.sizes), self.like(half)]
        return self.add(rank, run, [*chain.from_iterable(below)], likes, "encoder")

    def _memory(self, inputs: tuple[Tensor, ...], count: int) -> tuple[Memory, AttentionalLSTMState]:
        """Returns the decoder's memory of the source and its first state; the last ``count`` inputs are last states."""
        model, end = self._model, len(inputs) - count
        values = joined(inputs[:end], len(self._source.sizes))
        values = model.encoder.dropout(values, self._encoder_seeds.output)
        encoded = model.encoded(values, torch.cat(inputs[end:], -1), self._batch.source_lengths)
        return encoded.memory, model.decoder.initial_state(encoded.summary)

    def _embed_target(self) -> list[list[Output]]:
        """Adds the target's embedding; returns its output for every chunk."""
        model, ids = self._model, self._batch.target_input
        drop = partial(model.target_dropout, seed=self._target_seed)
        return self.add_embedding(model.target_embedding, model.output.weight, ids, self._target, drop)

    def _read_out(self, outputs: Tensor) -> Sequence[Tensor]:
        return (self._model.read_out(outputs, self._output_seed).to(self.dtype),)

    @property
    def _hidden_like(self) -> Like:
        return self.like(self._target.steps, self._model.output.in_features)

    def _decode_at_once(self, tops: list[Output], last: list[Output]) -> int:
        """Adds the decoder with input feeding as one part, which returns the output layer's input."""
        targets = [*chain.from_iterable(self._embed_target())]

        def run(*inputs: Tensor) -> Sequence[Tensor]:
            embedded = torch.cat(inputs[: len(targets)], 1)
            memory, state = self._memory(inputs[len(targets) :], len(last))
            how, seeds = self._implementations, self._decoder_seeds
            return self._read_out(self._model.decoder(embedded, memory, state, how, seeds)[0])

        return self.add(self._homes[0], run, [*targets, *tops, *last], [self._hidden_like])

    def _decode(self, tops: list[Output], last: list[Output]) -> int:
        """Adds the decoder without input feeding, chunk by chunk; its last part returns the output layer's input."""
        decoder, homes = self._model.decoder, self._homes
        assert isinstance(decoder, ParallelDecoder)
        size, width = decoder.config.size, self._model.config.encoder.size

        def make_memory(*inputs: Tensor) -> Sequence[Tensor]:
            memory, state = self._memory(inputs, len(last))
            return memory.keys, memory.values, *chain(*((h.to(self.dtype), c) for h, c in state.layers))

        exact = torch.promote_types(self.dtype, torch.float32)
        # Keys and values stay on the bottom layer's rank.
        likes = [self.like(0)] * 2 + [self.like(size), self.like(size)._replace(dtype=exact)] * len(homes)
        memory = self.add(homes[0], make_memory, [*tops, *last], likes, "attention")
        contexts: list[Output] = []

        def attend(states: Tensor, keys: Tensor, values: Tensor) -> Sequence[Tensor]:
            lengths = self._batch.source_lengths
            return decoder.attend(states, Memory(keys, values, lengths), self._implementations)[:1]

        def add_attention(bottom: Output, chunk: int) -> Output:
            like = self.like(self._target.sizes[chunk], width)
            inputs = [bottom, (memory, 0), (memory, 1)]
            contexts.append((self.add(homes[0], attend, inputs, [like], "attention"), 0))
            return contexts[-1]

        how = self._implementations.recurrent("decoder")
        stack = ChunkedStack(
            decoder.stages(self._decoder_seeds),
            homes,
            self._target,
            decoder.dropout.probability,
            decoder.dropout.variational,
            "decoder",
            lambda _: how,
            attend=add_attention,
        )
        first = [[(memory, 2 + 2 * layer), (memory, 3 + 2 * layer)] for layer in range(len(homes))]
        outputs, _ = self.add_stack(stack, self._embed_target(), first)

        def combine(*inputs: Tensor) -> Sequence[Tensor]:
            hidden, attended = (
                torch.cat(part, 1) for part in (inputs[: len(outputs)], inputs[len(outputs) :])
            )
            return self._read_out(decoder.combined(hidden, attended))

        return self.add(homes[-1], combine, [*outputs, *contexts], [self._hidden_like])


class LanguageModelParts(Parts):
    """Parts of a window's forward pass by a model in training mode.

    The embedding is on the rank of the bottom layer, dropout of the top layer's outputs on that of the top layer. Each
    layer's state is passed from chunk to chunk, and stored in the model after the last one, see
    :attr:`econmt.model.language_model.LanguageModel.carried`.
    """

    def __init__(
        self, model: LanguageModel, plan: PipelinePlan, batch: AnyBatch, implementations: Implementations
    ) -> None:
        assert isinstance(batch, TextBatch)
        super().__init__(batch.targets, compute_dtype(model.embedding.weight))
        (homes,), (chunks,) = plan.homes, plan.chunks
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
            return (model.read_out(dropped).to(self.dtype),)

        layers = [(slice(layer, layer + 1), home) for layer, home in enumerate(homes)]
        embedded = self.add_embedding(model.embedding, model.output.weight, ids, cuts, drop)
        first = [self.add(home, partial(read_state, layer)) for layer, home in layers]
        stack = ChunkedStack(
            model.stages(seeds), homes, cuts, model.between, variational, "decoder", lambda _: how
        )
        tops, last = self.add_stack(stack, embedded, [[(number, 0), (number, 1)] for number in first])
        for (layer, home), state in zip(layers, last, strict=True):
            self.add(home, partial(write_state, layer), state)
        like = self.like(cuts.steps, model.output.in_features)
        self.hidden = self.add(homes[-1], read_out, tops, [like], "output"), 0


def divided(model: nn.Module, plan: PipelinePlan) -> Divided:
    """Divides a model over the stages as planned; a tied table is the output layer's."""
    parts: Callable[[AnyBatch, Implementations], Parts]
    carried: Sequence[int] = ()
    if isinstance(model, LanguageModel):
        (carried,) = plan.homes
        stages = {f"layers.{layer}": home for layer, home in enumerate(carried)}
        stages |= {"embedding": carried[0], "readout": carried[-1], "output": -1}
        parts = partial(LanguageModelParts, model, plan)
    else:
        assert isinstance(model, TranslationModel)
        both, upper, decoder = plan.homes
        stages = {f"encoder.upper_layers.{layer}": home for layer, home in enumerate(upper)}
        stages |= {f"encoder.forward_layers.{layer}": home for layer, home in enumerate(both[::2])}
        stages |= {f"encoder.backward_layers.{layer}": home for layer, home in enumerate(both[1::2])}
        stages |= {f"decoder.layers.{layer}": home for layer, home in enumerate(decoder)}
        stages |= dict.fromkeys(("source_embedding", "target_embedding"), 0)
        stages |= dict.fromkeys(("decoder.attention", "decoder.start"), decoder[0])
        stages |= {"decoder.combine": decoder[-1], "readout": decoder[-1], "output": -1}
        parts = partial(TranslationParts, model, plan)
    homes = {
        name: -1
        if parameter is model.output.weight
        else next(stage for prefix, stage in stages.items() if name.startswith(f"{prefix}."))
        for name, parameter in model.named_parameters()
    }
    return Divided(homes, model.output, model.pad, parts, carried)
