"""The translation model: embeddings, encoder, decoder and output layer.

Shapes: B batch, S source positions, T target positions, I embedding width, E encoder size, A attention size, V target
vocabulary, D input width of the output layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.config import recipe
from econmt.factored_ids import separate_ids
from econmt.model.decoder import InputFeedingDecoder, Memory, ParallelDecoder
from econmt.model.encoder import Encoder
from econmt.model.guided_alignment import TrainingGuides, alignment_losses
from econmt.model.implementations import Implementations
from econmt.model.layers import (
    Embedding,
    SeededDropout,
    initialize_embedding,
    initialize_linear,
    mean_of_valid,
)
from econmt.model.rematerialization import rematerialized
from econmt_ops import UniqueRows, linear_cross_entropy
from econmt_ops.core.scopes import layer
from econmt_ops.dispatch.rule import device_of
from econmt_ops.products.dropout import Seed
from econmt_ops.products.repeated import Inputs

DISTINCT = 0.75
"""Maximum share of distinct words in a batch for which it is faster to multiply each word once."""

ROWS = 64
"""Multiple to which the number of distinct words is rounded up: oneDNN builds a kernel for each number of rows, and
memory of equal size is reused for the next batch."""


def most_distinct(words: int) -> int:
    """Returns the maximum number of distinct words for which each word of a batch is multiplied once, in :data:`ROWS`.

    The tables of the distinct words' gates are kept, so that memory must be planned for this maximum; it is not above
    what natural text has. The number of distinct words grows as a power of the number of words (Heaps, 1978): batches
    of 128 sentences of similar length of IWSLT'15 have 228 distinct English words of 597, 724 of 2,132, 1,261 of 4,960
    and 1,928 of 12,800, all below 18 sqrt(n).
    """
    return min(int(DISTINCT * words), int(18.0 * words**0.5)) // ROWS * ROWS


class EncoderOutput(NamedTuple):
    """Batch of encoded sentences.

    Attributes:
        memory: keys (B, S, A), values (B, S, E) and lengths (B,) for the attention.
        summary: vectors from which the decoder's initial state is computed, (B, E).
    """

    memory: Memory
    summary: Tensor


ROWS_AT_ONCE = 1024
"""Number of target positions whose log-probabilities over the vocabulary are computed at once."""


class Predictions(NamedTuple):
    """Predictions of a model at N target positions.

    Attributes:
        hidden: input of the output layer, (N, D). weight, bias: parameters of the output layer, (V, D) and (V,).
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor

    def log_probs(self, rows: slice) -> Tensor:
        """Computes log-probabilities (n, V) of the next word in some rows, in float32."""
        return functional.linear(self.hidden[rows], self.weight, self.bias).float().log_softmax(dim=1)

    def blocks(self) -> Iterator[slice]:
        """Yields consecutive rows, few enough for their log-probabilities over the vocabulary to fit into memory."""
        for first in range(0, len(self.hidden), ROWS_AT_ONCE):
            yield slice(first, first + ROWS_AT_ONCE)

    def correct(self, words: Tensor) -> Tensor:
        """Counts how many of the words (N,) are the most probable ones; a scalar."""
        count = words.new_zeros(())
        for rows in self.blocks():
            count += (self.log_probs(rows).argmax(1) == words[rows]).sum()
        return count


class TranslationModel(nn.Module):
    """Attention-LSTM translation model.

    Args:
        source_size: size of the source vocabulary, special tokens included.
        target_size: size V of the target vocabulary.
        implementations: default implementations of the operations.
        factor_sizes: vocabulary sizes of the source factors; source ids are then joint ids, see
            :func:`econmt.factored_ids.joined_ids`.
    """

    pad = 0
    """Id of padding: positions that hold it give embeddings no gradient, and no loss counts it."""

    def __init__(
        self,
        config: recipe.Model,
        source_size: int,
        target_size: int,
        implementations: Implementations | None = None,
        factor_sizes: Sequence[int] = (),
    ) -> None:
        super().__init__()
        dropout = config.dropouts
        tying = config.weight_tying
        if tying in ("src_trg", "src_trg_softmax") and source_size != target_size:
            raise ValueError(
                f"{tying} needs one vocabulary, got {source_size} source and {target_size} target entries"
            )
        self.config = config
        self.source_size = source_size
        self.target_size = target_size
        self.source_sizes = source_size, *factor_sizes
        width = config.embedding
        self.source_embedding = Embedding(source_size, width, padding_idx=self.pad)
        self.source_factor_embeddings = nn.ModuleList(
            Embedding(size, factor_width, padding_idx=self.pad)
            for size, factor_width in zip(factor_sizes, config.source_factors_num_embed, strict=True)
        )
        self.target_embedding = Embedding(target_size, width, padding_idx=self.pad)
        if tying in ("src_trg", "src_trg_softmax"):
            self.target_embedding.weight = self.source_embedding.weight
        self.source_dropout, self.target_dropout = (
            SeededDropout(dropout.embedding, dropout.variational) for _ in range(2)
        )
        self.encoder = Encoder(config.encoder, config.source_width, dropout)
        self.decoder = (InputFeedingDecoder if config.decoder.input_feeding else ParallelDecoder)(config)
        self.output_dropout = SeededDropout(dropout.output, dropout.variational)
        tied = tying in ("trg_softmax", "src_trg_softmax")
        # A tied output layer has inputs of the embedding width; a decoder of another width is projected to it.
        self.readout: nn.Linear | None = None
        if tied and config.decoder.size != width:
            self.readout = nn.Linear(config.decoder.size, width)
        self.output = nn.Linear(width if tied else config.decoder.size, target_size)
        if tied:
            self.output.weight = self.target_embedding.weight
        self.implementations = Implementations() if implementations is None else implementations
        self.initialize()

    def initialize(self) -> None:
        """Draws initial values of all parameters from torch's default generator."""
        init = self.config.initialization
        initialize_linear(self.output, init)
        initialize_embedding(self.source_embedding.weight, init)
        if self.target_embedding.weight is not self.source_embedding.weight:
            initialize_embedding(self.target_embedding.weight, init)
        for table in self.source_factor_embeddings:
            assert isinstance(table, Embedding)
            initialize_embedding(table.weight, init)
        if self.readout is not None:
            initialize_linear(self.readout, init)
        self.encoder.initialize(init)
        self.decoder.initialize(init)

    def embed_source(self, ids: Tensor) -> Tensor:
        """Returns embeddings (..., I) of source ids (...): those of words and factors, concatenated or summed."""
        words, *factors = separate_ids(ids, self.source_sizes)
        parts: list[Tensor] = [self.source_embedding(words)]
        parts += [table(part) for table, part in zip(self.source_factor_embeddings, factors, strict=True)]
        if len(parts) > 1 and self.config.source_factors_combine == "concat":
            return torch.cat(parts, -1)
        return reduce(torch.add, parts)

    def encode(
        self, source: Tensor, lengths: Tensor, implementations: Implementations | None = None
    ) -> EncoderOutput:
        """Encodes sentences, ``source`` (B, S) int64, of ``lengths`` (B,) int64, each at least 1."""
        how = self.implementations if implementations is None else implementations
        with layer("embedding"):
            once = how.accepts_unique_rows("encoder")
            embedded = self._look_up(
                self.embed_source, math.prod(self.source_sizes), source, self.source_dropout, once
            )
        with layer("encoder"), self._source_kept_as_ids(embedded, source):
            values, last = self.encoder(embedded, lengths, how)
        return self.encoded(values, last, lengths)

    def _source_kept_as_ids(self, embedded: Inputs, source: Tensor) -> AbstractContextManager[None]:
        """Context in which autograd keeps ids (B, S) instead of their embeddings; with dropout, the embeddings."""
        if isinstance(embedded, UniqueRows) or self.source_dropout.drops or not torch.is_grad_enabled():
            return nullcontext()
        kind, dtype = embedded.device.type, embedded.dtype

        def look_up_again() -> Tensor:
            with torch.autocast(kind, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
                return self.embed_source(source)

        return rematerialized(embedded, look_up_again)

    def encoded(self, values: Tensor, last: Tensor, lengths: Tensor) -> EncoderOutput:
        """Returns the decoder's view of the source from encoder outputs (B, S, E) and the last hidden state (B, E)."""
        with layer("encoder"):
            average = self.config.decoder.state_init == "avg"
            summary = mean_of_valid(values, lengths) if average else last
        with layer("attention"):
            keys = self.decoder.attention.keys(values)
        return EncoderOutput(Memory(keys, values, lengths), summary)

    def forward(
        self,
        source: Tensor,
        source_lengths: Tensor,
        target_input: Tensor,
        implementations: Implementations | None = None,
    ) -> Tensor:
        """Computes the inputs of the output layer under teacher forcing, (B, T, D).

        ``source`` (B, S) and ``target_input`` (B, T), BOS and the target, are int64; ``source_lengths`` (B,).
        """
        how = self.implementations if implementations is None else implementations
        return self._decode(self.encode(source, source_lengths, how), target_input, how)[0]

    def predict(
        self, source: Tensor, source_lengths: Tensor, target_input: Tensor, positions: Tensor
    ) -> Predictions:
        """Predicts under teacher forcing, see :meth:`forward`, at N target positions, those of a mask (B, T)."""
        how = self.implementations
        hidden, _ = self._decode(self.encode(source, source_lengths, how), target_input, how)
        return Predictions(hidden[positions], self.output.weight, self.output.bias)

    def _decode(
        self, encoded: EncoderOutput, target_input: Tensor, how: Implementations
    ) -> tuple[Tensor, Tensor]:
        """Returns the inputs of the output layer (B, T, D) and the attention (B, T, S) under teacher forcing."""
        with layer("embedding"):
            embedded = self._look_up(
                self.target_embedding,
                self.target_embedding.num_embeddings,
                target_input,
                self.target_dropout,
                how.accepts_unique_rows("decoder"),
                device_of(target_input) == "cuda",
            )
        with layer("decoder"):
            state = self.decoder.initial_state(encoded.summary)
            outputs, attention, _ = self.decoder(embedded, encoded.memory, state, how)
        with layer("output"):
            return self.read_out(outputs), attention

    def read_out(self, outputs: Tensor, seed: Seed | None = None) -> Tensor:
        """Returns the output layer's input (B, T, D) from decoder outputs; ``seed``: dropout seed, None: drawn now."""
        dropped: Tensor = self.output_dropout(outputs, seed)
        return dropped if self.readout is None else self.readout(dropped)

    def loss(
        self,
        source: Tensor,
        source_lengths: Tensor,
        target_input: Tensor,
        target_output: Tensor,
        label_smoothing: float = 0.0,
        implementations: Implementations | None = None,
        guides: TrainingGuides | None = None,
    ) -> Tensor:
        """Computes the cross-entropy summed over the target tokens without padding, a float32 scalar in nats.

        Args:
            source, source_lengths, target_input: see :meth:`forward`.
            target_output: tokens to predict, the target and EOS, (B, T) int64.
            label_smoothing: probability mass spread evenly over all V target tokens.
            guides: alignments and weights of the pairs; None without any.
        """
        how = self.implementations if implementations is None else implementations
        guides = TrainingGuides() if guides is None else guides
        encoded = self.encode(source, source_lengths, how)
        hidden, attention = self._decode(encoded, target_input, how)
        aligned = None if guides.alignment is None else attention
        del attention  # a reference would keep its memory during the output layer
        with layer("output"):
            rows, targets = hidden, target_output
            if (
                guides.weights is None
                and device_of(hidden) == "cuda"
                and hidden.transpose(0, 1).is_contiguous()
            ):
                rows, targets = rows.transpose(0, 1), targets.t()  # time is first in memory: no copy
            rows = rows.reshape(-1, rows.size(-1))
            loss = linear_cross_entropy(
                rows,
                self.output.weight,
                targets.reshape(-1),
                bias=self.output.bias,
                label_smoothing=label_smoothing,
                ignore_index=self.pad,
                reduction="sum" if guides.weights is None else "none",
                implementation=how.output,
            )
            if guides.weights is not None:
                loss = (loss.view_as(target_output).sum(1) * guides.weights).sum()
        if guides.alignment is not None and aligned is not None:
            with layer("attention"):
                each = alignment_losses(aligned, guides.alignment)
                each = each if guides.weights is None else each * guides.weights
            loss = loss + guides.alignment_weight * each.sum()
        return loss.to(torch.float32)

    def alignment_loss(
        self,
        source: Tensor,
        source_lengths: Tensor,
        target_input: Tensor,
        alignment: Tensor,
        implementations: Implementations | None = None,
    ) -> Tensor:
        """Computes the alignment loss alone, summed over target tokens, a float32 scalar; see :meth:`loss`."""
        how = self.implementations if implementations is None else implementations
        _, attention = self._decode(self.encode(source, source_lengths, how), target_input, how)
        return alignment_losses(attention, alignment).sum().to(torch.float32)

    def _look_up(
        self,
        embedding: Callable[[Tensor], Tensor],
        size: int,
        ids: Tensor,
        dropout: SeededDropout,
        once: bool,
        time_first: bool = False,
    ) -> Inputs:
        """Looks up ids (B, T) and applies dropout; returns all embeddings, or those of the distinct words only.

        Distinct words are not used with dropout, which differs by position, nor on a GPU, where counting them would
        synchronise.

        Args:
            embedding: function from ids to embeddings.
            size: number of different ids, a bound for estimates, whose ids have no values.
            ids: (B, T).
            dropout: dropout of this side's embeddings.
            once: True if the layer that reads the embeddings accepts the distinct words.
            time_first: True if the embeddings of a step lie together in memory, as decoders on a GPU read them.
        """
        if once and not (dropout.drops or device_of(ids) == "cuda") and torch.is_grad_enabled():
            words, positions = torch.unique(ids, return_inverse=True)
            rows = -(-min(words.numel(), size) // ROWS) * ROWS
            if rows <= most_distinct(ids.numel()):
                words = functional.pad(words, (0, rows - words.numel()), value=self.pad)
                return UniqueRows(embedding(words), positions)
        embedded = embedding(ids.t()).transpose(0, 1) if time_first else embedding(ids)
        dropped: Tensor = dropout(embedded)
        return dropped

    def parameter_layers(self) -> dict[str, str]:
        """Returns the memory ledger's layer (embedding, encoder, attention, decoder, output) of each parameter."""
        ledger_layers = {
            "source_embedding": "embedding",
            "source_factor_embeddings": "embedding",
            "target_embedding": "embedding",
            "encoder": "encoder",
            "decoder.attention": "attention",
            "decoder": "decoder",
        }
        names = [name for name, _ in self.named_parameters()]
        return {
            name: next((own for prefix, own in ledger_layers.items() if name.startswith(prefix)), "output")
            for name in names
        }


def build_model(
    config: recipe.Recipe, source_size: int, target_size: int, factor_sizes: Sequence[int] = ()
) -> TranslationModel:
    """Creates the initialised model of a recipe with its implementations; vocabulary sizes include special tokens."""
    return TranslationModel(
        config.translation_model,
        source_size,
        target_size,
        implementations=Implementations.of(config.ops),
        factor_sizes=factor_sizes,
    )
