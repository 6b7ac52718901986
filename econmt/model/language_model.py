"""The language model: an embedding, a stack of recurrent layers, an output layer.

Shapes: B rows, T tokens of each, L layers, H layer width, E embedding width, V vocabulary, D input width of the output
layer, S states of a layer, W width of the widest state.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.config import recipe
from econmt.model.activation_penalties import ActivationPenalties
from econmt.model.cells import CELLS
from econmt.model.implementations import Implementations
from econmt.model.layers import (
    Embedding,
    LayerStage,
    RecurrentLayer,
    SeededDropout,
    draw_seed,
    initialize_embedding,
    initialize_linear,
    make_layer,
)
from econmt_ops import linear_cross_entropy
from econmt_ops.core.scopes import layer
from econmt_ops.core.weights import State as State
from econmt_ops.products.dropout import Seed, apply_dropout, keep_mask
from econmt_ops.products.stack import StackOptions, run_stack

ALL = slice(None)


class Seeds(NamedTuple):
    """Dropout seeds of a forward pass in the order of drawing; None where nothing is dropped.

    Attributes:
        words: for whole words. inputs: for embeddings. weights: for the recurrent matrix of each layer.
        layers: for values between layers. output: for the input of the output layer.
    """

    words: Seed | None
    inputs: Seed | None
    weights: tuple[Seed | None, ...]
    layers: Seed | None
    output: Seed | None


class LanguageModel(nn.Module):
    """Model that predicts each token of a text from all previous ones.

    Truncated backpropagation through time reads a text window by window. Each window starts from the state after the
    previous one, through which no gradient flows. The state is kept in the buffer :attr:`carried`, whose fixed address
    allows steps to be captured in a CUDA graph, and which checkpoints save.

    Args:
        size: V, special tokens included.
        rows: initial number of rows with a carried state; larger batches enlarge the buffer.
        implementations: default implementations of the operations.

    Attributes:
        sizes: H of each layer, bottom first.
        carried: states from which training continues, (S, L, 1 + rows, W), of the LSTM h and c; narrower states have
            zeros behind them, and the first row is for padding rows.
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
        self.cell = CELLS[config.cell]
        self.sizes = config.sizes
        reads = [config.embedding, *self.sizes[:-1]]
        layers = (make_layer(config.cell, *widths) for widths in zip(reads, self.sizes, strict=True))
        self.layers = nn.ModuleList(layers)
        self._state_widths = [
            [read if name == "x" else size for name in self.cell.cell.states]
            for read, size in zip(reads, self.sizes, strict=True)
        ]
        self.weight_dropout = SeededDropout(dropout.weights, variational=False, rows=False)
        self.output_dropout = SeededDropout(dropout.output, dropout.variational)
        tied, top = config.weight_tying == "softmax", self.sizes[-1]
        # A tied output layer has inputs of the embedding width; layers of another width are projected to it.
        self.readout: nn.Linear | None = None
        if tied and top != config.embedding:
            self.readout = nn.Linear(top, config.embedding)
        self.output = nn.Linear(config.embedding if tied else top, size)
        if tied:
            self.output.weight = self.embedding.weight
        self.implementations = Implementations() if implementations is None else implementations
        self.register_buffer("carried", self._zero_states(torch.zeros(()), rows))
        self._evaluated: Tensor | None = None
        self.initialize()

    def initialize(self) -> None:
        """Draws initial values of all parameters from torch's default generator."""
        init = self.config.initialization
        initialize_linear(self.output, init)
        initialize_embedding(self.embedding.weight, init)
        if self.readout is not None:
            initialize_linear(self.readout, init)
        for each in self.layers:
            assert isinstance(each, RecurrentLayer)
            each.initialize(init)

    def forward(
        self, inputs: Tensor, state: State | None = None, implementations: Implementations | None = None
    ) -> tuple[Tensor, State]:
        """Computes the inputs of the output layer for ids (B, T) int64.

        ``state`` is that before the first token; None: zeros, the state at the beginning of a text.

        Returns:
            Inputs of the output layer, (B, T, D), and the state after the last token.
        """
        seeds = self.draw_seeds()
        outputs, state = self.run_layers(inputs, state, seeds, implementations)
        with layer("output"):
            return self.read_out(self.drop_outputs(outputs, seeds)), state

    def run_layers(
        self,
        inputs: Tensor,
        state: State | None,
        seeds: Seeds,
        implementations: Implementations | None = None,
    ) -> tuple[Tensor, State]:
        """Returns the top layer's outputs (B, T, H), before dropout, and the states; arguments as :meth:`forward`."""
        chosen = self.implementations if implementations is None else implementations
        how = chosen.recurrent("encoder")
        with layer("embedding"):
            embedded = self.drop_inputs(self.embedding(inputs), inputs, seeds)
        with layer("decoder"):
            weights = tuple(self.weights_of(number, seeds) for number in range(len(self.layers)))
            variational = self.config.dropouts.variational
            if len(set(self.sizes)) == 1:
                return self.cell.run(
                    embedded,
                    weights,
                    how,
                    state=state,
                    dropout=self.between,
                    dropout_seed=seeds.layers,
                    variational=variational,
                )

            def run(number: int, read: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
                first = None if state is None else (state[number],)
                outputs, (last,) = self.cell.run(read, (weights[number],), how, state=first)
                return outputs, last

            options = StackOptions(dropout=self.between, seed=seeds.layers, variational=variational)
            outputs, after = run_stack(run, embedded, len(weights), options)
            return outputs, tuple(after)

    @property
    def between(self) -> float:
        """Current dropout probability between layers; 0 in evaluation mode."""
        return self.config.dropouts.layers if self.training and len(self.layers) > 1 else 0.0

    def draw_seeds(self) -> Seeds:
        """Draws the dropout seeds of a forward pass, in an order that does not depend on who computes which part."""
        words = draw_seed(rows=False) if self.training and self.config.dropouts.embedding > 0.0 else None
        inputs = self.input_dropout.draw()
        weights = tuple(self.weight_dropout.draw() for _ in self.layers)
        between = draw_seed() if self.between > 0.0 else None
        return Seeds(words, inputs, weights, between, self.output_dropout.draw())

    def drop_inputs(self, embedded: Tensor, ids: Tensor, seeds: Seeds) -> Tensor:
        """Applies dropout to the embeddings of ids (B, T): the bottom layer's input (B, T, E)."""
        dropped: Tensor = self.input_dropout(self._drop_words(embedded, ids, seeds.words), seeds.inputs)
        return dropped

    def drop_outputs(self, outputs: Tensor, seeds: Seeds) -> Tensor:
        """Applies dropout to the top layer's outputs (B, T, H)."""
        dropped: Tensor = self.output_dropout(outputs, seeds.output)
        return dropped

    def read_out(self, dropped: Tensor) -> Tensor:
        """Returns the output layer's input (B, T, D) from the top layer's outputs after dropout (B, T, H)."""
        return dropped if self.readout is None else self.readout(dropped)

    def loss(
        self,
        inputs: Tensor,
        targets: Tensor,
        rows: Tensor,
        carries: Tensor,
        label_smoothing: float = 0.0,
        implementations: Implementations | None = None,
        penalties: ActivationPenalties | None = None,
    ) -> Tensor:
        """Computes the cross-entropy summed over the targets without padding, a float32 scalar in nats.

        Each row starts from its carried state and replaces it: in training in :attr:`carried`, in evaluation in a
        separate buffer.

        Args:
            inputs: ids, (B, T) int64. targets: next token of each input, (B, T).
            rows: number of the carried state of each row, from 1, (B,) int64.
            carries: 1 if a row starts from its state, 0 if it starts from zeros, (B,) int64.
            label_smoothing: probability mass spread evenly over all V tokens.
            penalties: weights of penalties on the top layer's outputs, which are added in training; None: none.
        """
        how = self.implementations if implementations is None else implementations
        seeds = self.draw_seeds()
        with layer("decoder"):
            state = self.read_states(rows, carries)
        outputs, state = self.run_layers(inputs, state, seeds, how)
        with layer("decoder"):
            self.write_states(rows, state)
        with layer("output"):
            dropped = self.drop_outputs(outputs, seeds)
            hidden = self.read_out(dropped)
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
            if self.training and penalties is not None and any(penalties):
                loss = loss + penalties.loss(outputs, dropped, targets != self.pad)
        return loss.to(torch.float32)

    def read_states(self, rows: Tensor, carries: Tensor, layers: slice = ALL) -> State:
        """Returns the states from which layers start a batch; arguments as :meth:`loss`."""
        states = self._state_buffer(rows)[:, layers]
        return self.unpack_states(states.index_select(2, rows) * carries[:, None].to(states.dtype), layers)

    @torch.no_grad()
    def write_states(self, rows: Tensor, state: State, layers: slice = ALL) -> None:
        """Stores the states of layers after a batch, which :meth:`read_states` began, for their next batch."""
        states = self.carried if self.training else self._evaluated
        assert states is not None
        states[:, layers].index_copy_(2, rows, self._pack_states(state))

    def unpack_states(self, states: Tensor, layers: slice = ALL) -> State:
        """Returns the states of layers, bottom first, from those of a batch as in the buffer, (S, L, B, W)."""
        return tuple(
            tuple(part[:, :width] for part, width in zip(parts, widths, strict=True))
            for parts, widths in zip(zip(*states, strict=True), self._state_widths[layers], strict=True)
        )

    def _pack_states(self, state: State) -> Tensor:
        """Undoes :meth:`unpack_states`, in the type of the buffer."""
        width, dtype = self.carried.shape[3], self.carried.dtype

        def padded(part: Tensor) -> Tensor:
            part = part.to(dtype)
            return part if part.shape[1] == width else functional.pad(part, (0, width - part.shape[1]))

        kinds = zip(*state, strict=True)
        return torch.stack([torch.stack([padded(part) for part in parts]) for parts in kinds])

    def _zero_states(self, like: Tensor, rows: int) -> Tensor:
        """Returns a buffer of carried states for a number of rows, with the type and device of a tensor."""
        widest = max(map(max, self._state_widths))
        return like.new_zeros(len(self.cell.cell.states), len(self.layers), 1 + rows, widest)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Returns the log-probabilities of all tokens (N, V) in float32, from hidden vectors (N, D)."""
        return nn.functional.linear(hidden, self.output.weight, self.output.bias).float().log_softmax(dim=1)

    def _drop_words(self, embedded: Tensor, ids: Tensor, seed: Seed | None) -> Tensor:
        """Applies dropout of whole words to embeddings (B, T, E): all occurrences in the batch together."""
        if seed is None:
            return embedded
        probability = self.config.dropouts.embedding
        words = keep_mask((self.embedding.num_embeddings,), probability, seed, embedded.device)
        return apply_dropout(embedded, words[ids][..., None], probability)

    def stages(self, seeds: Seeds) -> list[LayerStage]:
        """Returns the layers as stages of a forward pass, bottom first."""
        return [
            LayerStage(
                partial(self.weights_of, number, seeds), size, seeds.layers if number else None, number
            )
            for number, size in enumerate(self.sizes)
        ]

    def weights_of(self, number: int, seeds: Seeds) -> Any:
        """Returns a layer's weights, with dropout of the recurrent matrix in training."""
        each = self.layers[number]
        assert isinstance(each, RecurrentLayer)
        weights, seed = each.weights, seeds.weights[number]
        if seed is None:
            return weights
        return weights._replace(hidden=self.weight_dropout(weights.hidden[None], seed)[0])

    def _state_buffer(self, rows: Tensor) -> Tensor:
        """Returns the buffer of carried states for rows of these numbers (B,), enlarged if necessary."""
        if self.training:
            if len(rows) >= self.carried.shape[2]:
                self.carried = self._zero_states(self.carried, len(rows))
            return self.carried
        states, most = self._evaluated, int(rows.max())
        if states is None or states.device != self.carried.device:
            states = self._zero_states(self.carried, most)
        elif states.shape[2] <= most:  # the rows before may be other parts of the same batch
            states = functional.pad(states, (0, 0, 0, most + 1 - states.shape[2]))
        self._evaluated = states
        return states

    def parameter_layers(self) -> dict[str, str]:
        """Returns the memory ledger's layer (embedding, decoder, output) of each parameter, by name."""
        ledger_layers = {"embedding": "embedding", "layers": "decoder"}
        return {
            name: ledger_layers.get(name.partition(".")[0], "output") for name, _ in self.named_parameters()
        }


def build_language_model(config: recipe.Recipe, size: int, rows: int = 1) -> LanguageModel:
    """Creates the initialised model of a recipe with its implementations; ``size`` includes special tokens."""
    assert isinstance(config.model, recipe.LanguageModelSection)
    return LanguageModel(config.model, size, rows, implementations=Implementations.of(config.ops))
