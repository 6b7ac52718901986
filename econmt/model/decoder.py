"""Decoders: stacks of recurrent layers over the target with attention over the source.

Shapes: B batch, T target positions, S source positions, I embedding size, H decoder size, E encoder size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from econmt.config import recipe
from econmt.model.attention import Attention
from econmt.model.cells import CELLS
from econmt.model.implementations import Implementations
from econmt.model.layers import RecurrentLayer, SeededDropout, initialize_linear, make_layer, weights_of
from econmt_ops import AttentionalLSTMState, AttentionalLSTMWeights, LSTMState, attentional_lstm
from econmt_ops.core.dropout import Seed
from econmt_ops.core.repeated import Inputs
from econmt_ops.core.scopes import layer as account
from econmt_ops.core.weights import State


class Memory(NamedTuple):
    """Source as the decoder reads it: keys (B, S, A), values (B, S, E), lengths (B,)."""

    keys: Tensor
    values: Tensor
    lengths: Tensor


class Recurrent(NamedTuple):
    """Decoder state between two steps: the states of all layers and the attentional hidden vector o, (B, H) each.

    ``extra`` has the coverage (B, S, C) of a decoder with coverage, after the first step.
    """

    layers: State
    output: Tensor
    extra: tuple[Tensor, ...] = ()


class Decoder(nn.Module, ABC):
    """Base class of decoders: layers, attention, and the combination of state and context.

    o_t = tanh(combine [h_t ; context_t]) is the attentional hidden vector (Luong et al., 2015, equation 5).
    """

    is_unfused = False
    """True if the decoder computes one step at a time in PyTorch, in searches too."""

    def __init__(
        self,
        config: recipe.DecoderSection,
        attention: recipe.AttentionSection,
        input_size: int,
        encoder_size: int,
        dropout: recipe.Dropout,
    ) -> None:
        super().__init__()
        self.config = config
        self.cell = CELLS[config.cell]
        self.attention = self.make_attention(attention, encoder_size, input_size)
        self.dropout = SeededDropout(dropout.stacks[1], dropout.variational)
        self.widths = self._input_widths(input_size, encoder_size)
        self.layers = nn.ModuleList(map(self.make_layer, self.widths))
        self.combine = self.make_combine(encoder_size)
        self.start: nn.Linear | None = None
        if config.state_init != "zero":
            self.start = nn.Linear(encoder_size, len(self.started) * config.layers * config.size)

    @property
    def started(self) -> list[str]:
        """Names of the states of a layer that the source gives; x, the input before the first step, is zero."""
        return [name for name in self.cell.cell.states if name != "x"]

    def make_attention(
        self,
        attention: recipe.AttentionSection,
        encoder_size: int,
        input_size: int,  # noqa: ARG002  only unfused attention reads words
    ) -> Attention:
        """Creates the attention; ``input_size`` is the width of target embeddings."""
        return Attention(attention, encoder_size, self.config.size)

    def make_layer(self, width: int) -> RecurrentLayer:
        """Creates the parameters of a layer with inputs of ``width`` values."""
        return make_layer(self.config, width, self.config.size)

    def make_combine(self, encoder_size: int) -> nn.Linear:
        """Creates the layer that maps [h ; context] to the argument of tanh in o."""
        return nn.Linear(self.config.size + encoder_size, self.config.size)

    def start_vectors(self, projected: Tensor) -> Tensor:
        """Computes the initial states (B, .) from the outputs of their affine map."""
        return torch.tanh(projected)

    @abstractmethod
    def _input_widths(self, input_size: int, encoder_size: int) -> list[int]:
        """Returns the input width of every layer, bottom first."""

    @abstractmethod
    def draw_seeds(self) -> tuple[Seed | None, ...]:
        """Draws the dropout seeds of a forward pass, in an order that does not depend on who computes which part."""

    @abstractmethod
    def forward(
        self,
        inputs: Inputs,
        memory: Memory,
        state: Recurrent,
        implementations: Implementations,
        seeds: tuple[Seed | None, ...] | None = None,
    ) -> tuple[Tensor, Tensor, Recurrent]:
        """Decodes under teacher forcing.

        Args:
            inputs: target embeddings, (B, T, I), or those of the distinct words.
            memory: the source. state: state before the first position.
            implementations: implementations of the operations.
            seeds: dropout seeds from :meth:`draw_seeds`; None: drawn now.

        Returns:
            Attentional hidden vectors (B, T, H), attention (B, T, S), and the state after the last position.
        """

    def initial_state(self, summary: Tensor, start: Callable[[Tensor], Tensor] | None = None) -> Recurrent:
        """Computes the initial state from a ``summary`` (B, E) of the source: tanh of an affine map, or zero.

        ``start`` replaces the affine map. The tanh of its results is rounded from float64, so that other libraries
        compute the same values.
        """
        batch, size, names = summary.shape[0], self.config.size, self.started
        if self.start is None:
            vectors = summary.new_zeros(batch, len(names), len(self.layers), size)
        else:
            if start is None:
                vectors = self.start_vectors(self.start(summary))
            else:
                vectors = self.start_vectors(start(summary).double()).to(summary.dtype)
            vectors = vectors.view(batch, len(names), len(self.layers), size)
        # States that accumulate over steps have at least float32; h does not accumulate.
        exact = torch.promote_types(vectors.dtype, torch.float32)
        parts = [
            part if name == "h" else part.to(exact)
            for name, part in zip(names, vectors.unbind(1), strict=True)
        ]
        layers = tuple(
            (
                *(part[:, layer] for part in parts),
                *(summary.new_zeros(batch, width) for name in self.cell.cell.states if name == "x"),
            )
            for layer, width in enumerate(self.widths)
        )
        return Recurrent(layers, torch.zeros_like(vectors[:, 0, 0]))

    def initialize(self, init: recipe.Initialization) -> None:
        """Draws initial values of all parameters."""
        self.attention.initialize(init)
        for layer in self.layers:
            assert isinstance(layer, RecurrentLayer)
            layer.initialize(init)
        initialize_linear(self.combine, init)
        if self.start is not None:
            initialize_linear(self.start, init)


class InputFeedingDecoder(Decoder):
    """Decoder with input feeding: the bottom layer reads [inputs_t ; o_{t-1}], the top layer attends."""

    def _input_widths(self, input_size: int, encoder_size: int) -> list[int]:  # noqa: ARG002
        return [input_size + self.config.size] + [self.config.size] * (self.config.layers - 1)

    def draw_seeds(self) -> tuple[Seed | None, ...]:
        """See :meth:`Decoder.draw_seeds`; one seed for all steps."""
        return (self.dropout.draw(),)

    def forward(
        self,
        inputs: Inputs,
        memory: Memory,
        state: Recurrent,
        implementations: Implementations,
        seeds: tuple[Seed | None, ...] | None = None,
    ) -> tuple[Tensor, Tensor, Recurrent]:
        """See :meth:`Decoder.forward`; all steps are one call of ``econmt_ops.attentional_lstm``."""
        attention = self.attention
        (seed,) = self.draw_seeds() if seeds is None else seeds
        weights = AttentionalLSTMWeights(
            layers=weights_of(self.layers),
            query=attention.query,
            score=attention.score,
            combine=self.combine.weight,
            combine_bias=self.combine.bias,
        )
        outputs, alignment, after = attentional_lstm(
            inputs,
            memory.keys,
            memory.values,
            weights,
            lengths=memory.lengths,
            state=AttentionalLSTMState(cast(LSTMState, state.layers), state.output),
            input_feeding=True,
            residual=self.config.residual,
            dropout=0.0 if seed is None else self.dropout.probability,
            dropout_seed=seed,
            variational=self.dropout.variational,
            layer_norm=attention.layer_norm,
            scale=attention.scale,
            clean=True,  # encoder outputs are zero at padded positions
            overwrites=True,  # the output layer and dropout hand on gradients of their own
            **implementations.recurrent("decoder"),
        )
        return outputs, alignment, Recurrent(after.layers, after.output)


class ParallelDecoder(Decoder):
    """Decoder without input feeding (GNMT; Wu et al., 2016): the bottom layer attends, upper layers read its context.

    No step depends on an attentional vector, so each layer and the attention process the whole target at once.
    """

    def _input_widths(self, input_size: int, encoder_size: int) -> list[int]:
        return [input_size] + [self.config.size + encoder_size] * (self.config.layers - 1)

    def draw_seeds(self) -> tuple[Seed | None, ...]:
        """See :meth:`Decoder.draw_seeds`; one seed for the input of each layer above the bottom."""
        return tuple(self.dropout.draw() for _ in range(len(self.layers) - 1))

    def forward(
        self,
        inputs: Inputs,
        memory: Memory,
        state: Recurrent,
        implementations: Implementations,
        seeds: tuple[Seed | None, ...] | None = None,
    ) -> tuple[Tensor, Tensor, Recurrent]:
        """See :meth:`Decoder.forward`."""
        seeds = self.draw_seeds() if seeds is None else seeds
        weights = weights_of(self.layers)
        how = implementations.recurrent("decoder")
        outputs, (after,) = self.cell.run(inputs, weights[:1], how, state=state.layers[:1])
        states = [after]
        with account("attention"):
            contexts, alignment = self.attention(
                outputs, memory.keys, memory.values, memory.lengths, implementations
            )
        contexts = contexts.to(outputs.dtype)
        for layer in range(1, len(weights)):
            below = self.dropout(outputs, seeds[layer - 1])
            joined = torch.cat([below, contexts], dim=-1)
            outputs, (after,) = self.cell.run(
                joined, weights[layer : layer + 1], how, state=state.layers[layer : layer + 1]
            )
            if self.config.residual:
                outputs = outputs + below
            states.append(after)
        combined = self.combined(outputs, contexts)
        return combined, alignment, Recurrent(tuple(states), combined[:, -1])

    def combined(self, outputs: Tensor, contexts: Tensor) -> Tensor:
        """Computes attentional hidden vectors (B, T, H) from top-layer outputs (B, T, H) and contexts (B, T, E)."""
        return torch.tanh(self.combine(torch.cat([outputs, contexts], dim=-1)))
