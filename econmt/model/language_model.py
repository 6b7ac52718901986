"""The language model: an embedding, a stack of LSTM layers, an output layer.

Shapes: B rows, T tokens of each, L layers, H their width, E the embedding's, V vocabulary, D width of the output layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from econmt.config import recipe
from econmt.model.implementations import Implementations
from econmt.model.layers import (
    Embedding,
    LSTMLayer,
    SeededDropout,
    draw_seed,
    initialize_embedding,
    initialize_linear,
)
from econmt_ops import LSTMWeights, linear_cross_entropy, lstm
from econmt_ops.core.dropout import Seed, apply_dropout, keep_mask
from econmt_ops.core.scopes import layer

State = tuple[tuple[Tensor, Tensor], ...]
"""(h, c) of every layer, bottom first, each (B, H)."""


class Seeds(NamedTuple):
    """Seeds of a forward pass's dropout masks, in the order in which they are drawn; None where nothing is dropped.

    Attributes:
        words: of words. inputs: of embeddings. weights: of the recurrent matrix of every layer. layers: between layers.
        output: of what the output layer reads.
    """

    words: Seed | None
    inputs: Seed | None
    weights: tuple[Seed | None, ...]
    layers: Seed | None
    output: Seed | None


class LanguageModel(nn.Module):
    """Predicts each token of a text from all those before it.

    Truncated backpropagation through time reads a text window by window and goes on with the state that the window
    before has left, through which no gradient flows. That state lies in the buffer :attr:`carried`, always at the same
    place, so that a CUDA graph finds it there each time it is replayed, and a checkpoint has it.

    Args:
        config: the recipe's model section.
        size: V, special symbols counted.
        rows: for how many rows of a batch there is a carried state at first; a larger batch makes room.
        implementations: of the ops, where a call names no others.

    Attributes:
        carried: (2, L, 1 + rows, H): h and c that training goes on with. The first row is that of padding rows.
    """

    pad = 0
    """Id of padding, which no loss counts."""
    carried: Tensor

    def __init__(
        self,
        config: recipe.LanguageModelSection,
        size: int,
        rows: int = 1,
        implementations: Implementations | None = None,
    ) -> None:
        super().__init__()
        dropout = config.dropouts
        self.config = config
        self.embedding = Embedding(size, config.embedding, padding_idx=self.pad)
        self.input_dropout = SeededDropout(dropout.inputs, dropout.variational)
        self.layers = nn.ModuleList(
            LSTMLayer(config.embedding if number == 0 else config.size, config.size)
            for number in range(config.layers)
        )
        self.weight_dropout = SeededDropout(dropout.weights, variational=False, rows=False)
        self.output_dropout = SeededDropout(dropout.output, dropout.variational)
        tied = config.weight_tying == "softmax"
        # A tied output layer reads vectors as wide as an embedding; layers of another width are mapped to it.
        self.readout: nn.Linear | None = None
        if tied and config.size != config.embedding:
            self.readout = nn.Linear(config.size, config.embedding)
        self.output = nn.Linear(config.embedding if tied else config.size, size)
        if tied:
            self.output.weight = self.embedding.weight
        self.implementations = Implementations() if implementations is None else implementations
        self.register_buffer("carried", torch.zeros(2, config.layers, 1 + rows, config.size))
        self._evaluated: Tensor | None = None
        self.initialize()

    def initialize(self) -> None:
        """Draw first values of all parameters from torch's default generator."""
        init = self.config.initialization
        initialize_linear(self.output, init)
        initialize_embedding(self.embedding.weight, init)
        if self.readout is not None:
            initialize_linear(self.readout, init)
        for each in self.layers:
            assert isinstance(each, LSTMLayer)
            each.initialize(init)

    def forward(
        self, inputs: Tensor, state: State | None = None, implementations: Implementations | None = None
    ) -> tuple[Tensor, State]:
        """Hidden vectors for the output layer, and the state after the last token.

        Args:
            inputs: (B, T) int64 ids.
            state: before the first of them; None: that of the beginning of a text, zeros.
            implementations: of the ops; None: the model's.

        Returns:
            (B, T, D), and the state to go on with.
        """
        how = self.implementations if implementations is None else implementations
        seeds = self.draw_seeds()
        with layer("embedding"):
            embedded = self.drop_inputs(self.embedding(inputs), inputs, seeds)
        with layer("decoder"):
            weights = tuple(self.weights_of(number, seeds) for number in range(len(self.layers)))
            outputs, state = lstm(
                embedded,
                weights,
                state=state,
                dropout=self.between,
                dropout_seed=seeds.layers,
                variational=self.config.dropouts.variational,
                **how.for_encoder(),
            )
        with layer("output"):
            return self.read_out(outputs, seeds), state

    @property
    def between(self) -> float:
        """The probability with which values between layers are dropped now."""
        return self.config.dropouts.layers if self.training and len(self.layers) > 1 else 0.0

    def draw_seeds(self) -> Seeds:
        """Seeds for a forward pass: the same draws, whoever computes which part of it."""
        words = draw_seed(rows=False) if self.training and self.config.dropouts.embedding > 0.0 else None
        inputs = self.input_dropout.draw()
        weights = tuple(self.weight_dropout.draw() for _ in self.layers)
        between = draw_seed() if self.between > 0.0 else None
        return Seeds(words, inputs, weights, between, self.output_dropout.draw())

    def drop_inputs(self, embedded: Tensor, ids: Tensor, seeds: Seeds) -> Tensor:
        """Applies dropout to the embeddings of ids (B, T): the bottom layer's input (B, T, E)."""
        dropped: Tensor = self.input_dropout(self._drop_words(embedded, ids, seeds.words), seeds.inputs)
        return dropped

    def read_out(self, outputs: Tensor, seeds: Seeds) -> Tensor:
        """Returns the output layer's input (B, T, D) from the top layer's outputs (B, T, H)."""
        dropped: Tensor = self.output_dropout(outputs, seeds.output)
        return dropped if self.readout is None else self.readout(dropped)

    def loss(
        self,
        inputs: Tensor,
        targets: Tensor,
        rows: Tensor,
        carries: Tensor,
        label_smoothing: float = 0.0,
        implementations: Implementations | None = None,
    ) -> Tensor:
        """Cross-entropy summed over the targets that are not padding, a float32 scalar in nats.

        Each row goes on with the state that it left, and leaves another: in training in :attr:`carried`, in evaluation
        elsewhere, so that training goes on as if nothing had been.

        Args:
            inputs: (B, T) int64 ids. targets: (B, T) the token after each.
            rows: (B,) int64, of the state that each row goes on with, from 1.
            carries: (B,) int64, 1; 0 where a row begins from zeros.
            label_smoothing: probability mass spread evenly over all V tokens.
            implementations: of the ops; None: the model's.
        """
        how = self.implementations if implementations is None else implementations
        place = self.place(len(rows))
        with layer("decoder"):
            begin = place.index_select(2, rows) * carries[:, None].to(place.dtype)
        hidden, state = self(inputs, tuple(zip(*begin, strict=True)), how)
        with layer("decoder"), torch.no_grad():
            left = [
                torch.stack([part.to(place.dtype) for part in parts]) for parts in zip(*state, strict=True)
            ]
            place.index_copy_(2, rows, torch.stack(left))
        with layer("output"):
            loss = linear_cross_entropy(
                hidden.reshape(-1, hidden.size(-1)),
                self.output.weight,
                targets.reshape(-1),
                bias=self.output.bias,
                label_smoothing=label_smoothing,
                ignore_index=self.pad,
                reduction="sum",
                implementation=how.output,
            )
        return loss.to(torch.float32)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Returns the log-probabilities of all tokens (N, V) in float32, from hidden vectors (N, D)."""
        return nn.functional.linear(hidden, self.output.weight, self.output.bias).float().log_softmax(dim=1)

    def _drop_words(self, embedded: Tensor, ids: Tensor, seed: Seed | None) -> Tensor:
        """Embeddings (B, T, E) without the words that this batch drops, all others scaled up."""
        if seed is None:
            return embedded
        probability = self.config.dropouts.embedding
        words = keep_mask((self.embedding.num_embeddings,), probability, seed, embedded.device)
        return apply_dropout(embedded, words[ids][..., None], probability)

    def weights_of(self, number: int, seeds: Seeds) -> LSTMWeights:
        """Returns a layer's weights, with dropout of the recurrent matrix in training."""
        each = self.layers[number]
        assert isinstance(each, LSTMLayer)
        assert isinstance(each.hidden, nn.Parameter)
        assert isinstance(each.input, nn.Parameter)
        dropped = self.weight_dropout(each.hidden[None], seeds.weights[number])[0]
        return LSTMWeights(each.input, dropped, each.bias)

    def place(self, rows: int) -> Tensor:
        """Returns the buffer of states for a batch of so many rows."""
        if self.training:
            if rows >= self.carried.shape[2]:
                self.carried = self.carried.new_zeros(2, len(self.layers), 1 + rows, self.config.size)
            return self.carried
        there = self._evaluated
        if there is None or there.shape[2] <= rows or there.device != self.carried.device:
            there = self.carried.new_zeros(2, len(self.layers), 1 + rows, self.config.size)
            self._evaluated = there
        return there

    def parameter_layers(self) -> dict[str, str]:
        """The ledger's layer (embedding, decoder, output) of every parameter name."""
        rooms = {"embedding": "embedding", "layers": "decoder"}
        return {name: rooms.get(name.partition(".")[0], "output") for name, _ in self.named_parameters()}


def build_language_model(config: recipe.Recipe, size: int, rows: int = 1) -> LanguageModel:
    """The model of a recipe, with the implementations it asks for and first parameters.

    Args:
        config: the recipe.
        size: of the vocabulary, special symbols counted.
        rows: see :class:`LanguageModel`.
    """
    assert isinstance(config.model, recipe.LanguageModelSection)
    return LanguageModel(config.model, size, rows, implementations=Implementations.of(config.ops))
