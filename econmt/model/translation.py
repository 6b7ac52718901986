"""The translation model: embeddings, encoder, decoder and output layer.

Shapes: B batch, S source positions, T target positions, V target vocabulary, D width of the output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.config import recipe
from econmt.factored_ids import separate_ids
from econmt.model.copying import Copied, Copying, Decoded, Predictions, first_places, mixture_loss
from econmt.model.decoder import Memory
from econmt.model.factory import make_decoder, make_encoder
from econmt.model.implementations import Implementations
from econmt.model.layers import (
    Embedding,
    SeededDropout,
    initialize_embedding,
    initialize_linear,
    mean_of_valid,
)
from econmt.model.length_ratio import LengthRatio, length_loss
from econmt_ops import UniqueRows, linear_cross_entropy
from econmt_ops.core.dropout import Seed
from econmt_ops.core.repeated import Inputs
from econmt_ops.core.scopes import layer
from econmt_ops.dispatch.rule import device_of

DISTINCT = 0.75
"""Largest share of distinct words in a batch for which it pays to multiply each word once."""

ROWS = 64
"""Their number is rounded up to a multiple of this: oneDNN makes a kernel for each number of rows, and memory that is
given back can be taken again for the next batch's."""


def most_distinct(words: int) -> int:
    """Up to how many distinct ones of a batch's words each is multiplied once, in whole :data:`ROWS`.

    No more than text has, or what is not to be expected would have to be allowed for: tables of the gates of the
    distinct words are kept. The number of distinct words grows as a power of the number of words (Heaps, 1978). In
    batches of 128 sentences of like length of IWSLT'15 there are 228 English ones of 597, 724 of 2,132, 1,261 of 4,960
    and 1,928 of 12,800, fewer Vietnamese ones: 18 times the root of n is above all of them.
    """
    return min(int(DISTINCT * words), int(18.0 * words**0.5)) // ROWS * ROWS


class EncoderOutput(NamedTuple):
    """A batch of encoded sentences.

    Attributes:
        memory: keys (B, S, A), values (B, S, E) and lengths (B,) for the attention.
        summary: (B, E) what the decoder's first state is made from.
        length_ratios: (B,) target tokens expected for each source token, ends of sentences counted; None without a
            length task.
    """

    memory: Memory
    summary: Tensor
    length_ratios: Tensor | None = None


class TranslationModel(nn.Module):
    """An attention-LSTM translation model.

    Args:
        config: the recipe's model section.
        source_size: source vocabulary, special symbols counted.
        target_size: target vocabulary V.
        pad: the padding id; its embeddings get no gradient from positions that hold it, and no loss counts it.
        implementations: of the ops, where a call names no others.
        factor_sizes: vocabularies of the source factors; source ids are then those of
            :func:`econmt.factored_ids.joined_ids`.
    """

    def __init__(
        self,
        config: recipe.Model,
        source_size: int,
        target_size: int,
        pad: int = 0,
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
        self.pad = pad
        self.source_sizes = source_size, *factor_sizes
        self.source_embedding = Embedding(source_size, config.embedding, padding_idx=pad)
        self.source_factor_embeddings = nn.ModuleList(
            Embedding(size, width, padding_idx=pad)
            for size, width in zip(factor_sizes, config.source_factors_num_embed, strict=True)
        )
        self.target_embedding = Embedding(target_size, config.embedding, padding_idx=pad)
        if tying in ("src_trg", "src_trg_softmax"):
            self.target_embedding.weight = self.source_embedding.weight
        self.embedding_dropout = SeededDropout(dropout.embedding, dropout.variational)
        self.encoder = make_encoder(config, dropout)
        self.decoder = make_decoder(config, dropout)
        self.output_dropout = SeededDropout(dropout.output, dropout.variational)
        tied = tying in ("trg_softmax", "src_trg_softmax")
        # A tied output layer reads vectors as wide as an embedding; a decoder of another width is mapped to it.
        self.readout: nn.Linear | None = None
        if tied and config.decoder.size != config.embedding:
            self.readout = nn.Linear(config.decoder.size, config.embedding)
        self.output = nn.Linear(config.embedding if tied else config.decoder.size, target_size)
        if tied:
            self.output.weight = self.target_embedding.weight
        self.copying: Copying | None = None
        if config.decoder.copy_attention:
            if source_size != target_size:
                raise ValueError(
                    f"copy_attention needs one vocabulary, got {source_size} source and {target_size} target entries"
                )
            self.copying = Copying(config.encoder.size, self.output.in_features, config.embedding)
        self.length_ratio: LengthRatio | None = None
        if config.length_task != "none":
            self.length_ratio = LengthRatio(config.encoder.size, config.length_task_layers)
        self.implementations = Implementations() if implementations is None else implementations
        self.initialize()

    @property
    def output_weight(self) -> Tensor:
        """Weight (V, D) of the output layer."""
        return self.output.weight

    @property
    def output_bias(self) -> Tensor:
        """Bias (V,) of the output layer."""
        return self.output.bias

    def initialize(self) -> None:
        """Draw first values of all parameters from torch's default generator."""
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
        if self.copying is not None:
            self.copying.initialize(init)
        self.encoder.initialize(init)
        self.decoder.initialize(init)
        if self.length_ratio is not None:
            self.length_ratio.initialize(init)

    def words_of(self, ids: Tensor) -> Tensor:
        """The ids of words (...) alone, of source ids (...), int64."""
        return separate_ids(ids, self.source_sizes)[0]

    def embed_source(self, ids: Tensor) -> Tensor:
        """Embeddings (..., I) of source ids (...), int64: of words and, put side by side or added up, their factors."""
        words, *factors = separate_ids(ids, self.source_sizes)
        parts: list[Tensor] = [self.source_embedding(words)]
        parts += [table(part) for table, part in zip(self.source_factor_embeddings, factors, strict=True)]
        if len(parts) == 1:
            return parts[0]
        return (
            torch.cat(parts, -1)
            if self.config.source_factors_combine == "concat"
            else reduce(torch.add, parts)
        )

    def encode(
        self, source: Tensor, lengths: Tensor, implementations: Implementations | None = None
    ) -> EncoderOutput:
        """Encode sentences.

        Args:
            source: (B, S) int64 ids. lengths: (B,) int64, each at least 1.
            implementations: of the ops; None: the model's.
        """
        how = self.implementations if implementations is None else implementations
        with layer("embedding"):
            embedded = self._look_up(self.embed_source, source, how.looks_rows_up("encoder"))
        with layer("encoder"):
            values, last = self.encoder(embedded, lengths, how)
        return self.encoded(values, last, lengths)

    def encoded(self, values: Tensor, last: Tensor, lengths: Tensor) -> EncoderOutput:
        """Returns the decoder's view of the source from encoder outputs (B, S, E) and the last hidden state (B, E)."""
        average, ratios = self.config.decoder.state_init == "avg", None
        with layer("encoder"):
            mean = mean_of_valid(values, lengths) if average or self.length_ratio is not None else last
        if self.length_ratio is not None:
            with layer("output"):
                ratios = self.length_ratio(mean)
        with layer("attention"):
            keys = self.decoder.attention.keys(values)
            values = self.decoder.attention.values(values)
        return EncoderOutput(Memory(keys, values, lengths), mean if average else last, ratios)

    def forward(
        self,
        source: Tensor,
        source_lengths: Tensor,
        target_input: Tensor,
        implementations: Implementations | None = None,
    ) -> Tensor:
        """Hidden vectors for the output layer under teacher forcing.

        Args:
            source: (B, S) int64 ids. source_lengths: (B,). target_input: (B, T) int64, the target after BOS.
            implementations: of the ops; None: the model's.

        Returns:
            (B, T, D): ``econmt_ops.linear_cross_entropy`` with :attr:`output_weight` makes the loss of them, unless the
            model copies.
        """
        how = self.implementations if implementations is None else implementations
        return self._decode(self.encode(source, source_lengths, how), target_input, how).hidden

    def predict(
        self, source: Tensor, source_lengths: Tensor, target_input: Tensor, positions: Tensor
    ) -> Predictions:
        """Predicts under teacher forcing at the N target positions where ``positions`` (B, T) is True.

        Args:
            source: (B, S) int64 ids. source_lengths: (B,). target_input: (B, T) int64, the target after BOS.
        """
        how = self.implementations
        decoded = self._decode(self.encode(source, source_lengths, how), target_input, how)
        hidden = decoded.hidden[positions]
        copied: Copied | None = None
        if self.copying is not None:
            gates = self.copying(decoded, decoded.hidden.reshape(-1, decoded.hidden.shape[2]))
            owners, words = positions.nonzero()[:, 0], self.words_of(source)
            copied = Copied(
                gates[positions], decoded.attention[positions], words[owners], first_places(words)[owners]
            )
        return Predictions(hidden, self.output_weight, self.output_bias, copied)

    def _decode(self, encoded: EncoderOutput, target_input: Tensor, how: Implementations) -> Decoded:
        """See :meth:`forward`."""
        with layer("embedding"):
            embedded = self._look_up(
                self.target_embedding,
                target_input,
                how.looks_rows_up("decoder"),
                device_of(target_input) == "cuda",
            )
        with layer("decoder"):
            state = self.decoder.initial_state(encoded.summary)
            outputs, attention, _ = self.decoder(embedded, encoded.memory, state, how)
        with layer("output"):
            return Decoded(self.read_out(outputs), embedded, encoded.memory.values, attention)

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
        length_task_weight: float = 0.0,
    ) -> Tensor:
        """Cross-entropy summed over the target tokens that are not padding, a float32 scalar in nats.

        Args:
            source: (B, S) int64 ids. source_lengths: (B,). target_input: (B, T) int64, the target after BOS.
            target_output: (B, T) int64, the target before EOS and EOS.
            label_smoothing: probability mass spread evenly over all V target tokens. A model that copies has, in the
                place of its softmax's log-probability of a token, the smoothed one.
            implementations: of the ops; None: the model's.
            length_task_weight: of :meth:`length_loss`, which is added; 0: it is not.
        """
        how = self.implementations if implementations is None else implementations
        encoded = self.encode(source, source_lengths, how)
        decoded = None
        if self.copying is None:  # nothing but the hidden vectors is held
            hidden = self._decode(encoded, target_input, how).hidden
        else:
            decoded = self._decode(encoded, target_input, how)
            hidden = decoded.hidden
        with layer("output"):
            rows, targets = hidden, target_output
            if decoded is None and device_of(hidden) == "cuda" and hidden.transpose(0, 1).is_contiguous():
                rows, targets = rows.transpose(0, 1), targets.t()  # time is first in memory: no copy
            rows = rows.reshape(-1, rows.size(-1))
            loss = linear_cross_entropy(
                rows,
                self.output_weight,
                targets.reshape(-1),
                bias=self.output_bias,
                label_smoothing=label_smoothing,
                ignore_index=self.pad,
                reduction="sum" if decoded is None else "none",
                **how.for_output(),
            )
            if self.copying is not None and decoded is not None:
                gates = self.copying(decoded, rows)
                losses = loss.view_as(target_output)
                words = self.words_of(source)
                loss = mixture_loss(losses, gates, decoded.attention, words, target_output, self.pad)
        if length_task_weight > 0.0:
            loss = loss + length_task_weight * self.length_loss(encoded, target_output)
        return loss.to(torch.float32)

    def length_loss(self, encoded: EncoderOutput, target_output: Tensor) -> Tensor:
        """:func:`~econmt.model.length_ratio.length_loss` of a batch, for a model with a length task: a float32 scalar.

        Args:
            encoded: its sentences. target_output: (B, T) int64, the target before EOS and EOS.
        """
        task, ratios = self.config.length_task, encoded.length_ratios
        assert task != "none", "this model has no length task"
        assert ratios is not None
        with layer("output"):
            lengths = (target_output != self.pad).sum(dim=1)
            return length_loss(task, ratios, encoded.memory.lengths, lengths).to(torch.float32)

    def _look_up(
        self, embedding: Callable[[Tensor], Tensor], ids: Tensor, once: bool, time_first: bool = False
    ) -> Inputs:
        """Embeddings of ids (B, T), after dropout: written out or, to be multiplied once each, of the distinct words.

        Dropout makes every position another input, and a GPU would have to be waited for.

        Args:
            embedding: of all words.
            ids: (B, T).
            once: whether the LSTM that will read them can take the distinct words.
            time_first: True if the embeddings of a step lie together in memory, as decoders on a GPU read them.
        """
        drops = self.training and self.embedding_dropout.probability > 0.0
        if once and not (drops or ids.is_cuda) and torch.is_grad_enabled():
            words, places = torch.unique(ids, return_inverse=True)
            rows = -(-words.numel() // ROWS) * ROWS
            if rows <= most_distinct(ids.numel()):
                words = functional.pad(words, (0, rows - words.numel()), value=self.pad)
                return UniqueRows(embedding(words), places)
        embedded = embedding(ids.t()).transpose(0, 1) if time_first else embedding(ids)
        dropped: Tensor = self.embedding_dropout(embedded)
        return dropped

    def parameter_layers(self) -> dict[str, str]:
        """The ledger's layer (embedding, encoder, attention, decoder, output) of every parameter name."""
        rooms = {
            "source_embedding": "embedding",
            "source_factor_embeddings": "embedding",
            "target_embedding": "embedding",
            "encoder": "encoder",
            "decoder.attention": "attention",
            "decoder": "decoder",
        }
        names = [name for name, _ in self.named_parameters()]
        return {
            name: next((own for prefix, own in rooms.items() if name.startswith(prefix)), "output")
            for name in names
        }


def build_model(
    config: recipe.Recipe, source_size: int, target_size: int, factor_sizes: Sequence[int] = ()
) -> TranslationModel:
    """The model of a recipe, with the implementations it asks for and first parameters.

    Args:
        config: the recipe.
        source_size: source vocabulary, special symbols counted.
        target_size: target vocabulary.
        factor_sizes: vocabularies of the source factors.
    """
    return TranslationModel(
        config.translation_model,
        source_size,
        target_size,
        implementations=Implementations.of(config.ops),
        factor_sizes=factor_sizes,
    )
