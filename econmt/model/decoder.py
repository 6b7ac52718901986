"""Decoders: stacks of recurrent layers over the target with attention over the source.

Shapes: B batch, T target positions, S source positions, I embedding size, H decoder size, E encoder size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.config import recipe
from econmt.model.attention import Attention
from econmt.model.cells import CELLS
from econmt.model.implementations import Implementations
from econmt.model.layers import (
    LayerStage,
    RecurrentLayer,
    SeededDropout,
    initialize_linear,
    make_layer,
    weights_of,
)
from econmt_ops import AttentionalLSTMState, AttentionalLSTMWeights, ContextGate, attentional_lstm
from econmt_ops.cells.attention import LAYER_NORM_EPSILON
from econmt_ops.core.scopes import layer as account
from econmt_ops.core.weights import State
from econmt_ops.products.dropout import Seed
from econmt_ops.products.repeated import Inputs


class Memory(NamedTuple):
    """Source as the decoder reads it: keys (B, S, A), values (B, S, E), lengths (B,)."""

    keys: Tensor
    values: Tensor
    lengths: Tensor


class GatedCombination(nn.Linear):
    """Gate between state (H) and context (E) in the argument of tanh (Tu et al., 2017, section 3.2, "both").

    z = sigmoid(W [h; context] + b), then z * (W_h h + b_h) + (1 - z) * (W_c context + b_c).
    """

    def __init__(self, size: int, encoder_size: int) -> None:
        super().__init__(size + encoder_size, size)
        self.of_state = nn.Linear(size, size)
        self.of_context = nn.Linear(encoder_size, size)


class Decoder(nn.Module, ABC):
    """Base class of decoders: layers, attention, and the combination of state and context.

    o_t = tanh(combine [h_t ; context_t]) is the attentional hidden vector (Luong et al., 2015, equation 5). With layer
    normalization the argument of tanh, and of that in the initial states, is normalized.
    """

    def __init__(self, model: recipe.Model) -> None:
        super().__init__()
        config, dropout = model.decoder, model.dropouts
        encoder_size, size = model.encoder.size, config.size
        self.config = config
        self.cell = CELLS[config.cell]
        self.attention = Attention(model.attention, encoder_size, size)
        self.dropout = SeededDropout(dropout.layers, dropout.variational)
        self.widths = self._input_widths(model.embedding, encoder_size)
        layers = (make_layer(config.cell, width, size, config.rank) for width in self.widths)
        self.layers = nn.ModuleList(layers)
        gated = config.context_gating
        self.combine = GatedCombination(size, encoder_size) if gated else nn.Linear(size + encoder_size, size)
        vectors = len(self.started) * config.layers
        self.start: nn.Linear | None = None
        if config.state_init != "zero":
            self.start = nn.Linear(encoder_size, vectors * size)
        self.norm: nn.LayerNorm | None = None
        self.start_gain: nn.Parameter | None = None
        self.start_shift: nn.Parameter | None = None
        if model.layer_normalization:
            self.norm = nn.LayerNorm(size, LAYER_NORM_EPSILON)
            if self.start is not None:
                self.start_gain = nn.Parameter(torch.ones(vectors, size))
                self.start_shift = nn.Parameter(torch.zeros(vectors, size))

    @property
    def started(self) -> list[str]:
        """Names of the states of a layer that the source gives; x, the input before the first step, is zero."""
        return [name for name in self.cell.cell.states if name != "x"]

    def output_weights(self) -> tuple[Tensor, Tensor, ContextGate | None]:
        """Returns the combination as ``econmt_ops`` takes it: weight (H, H + E), bias (H,), and gate or None."""
        combine = self.combine
        if not isinstance(combine, GatedCombination):
            return combine.weight, combine.bias, None
        weight = torch.cat([combine.of_state.weight, combine.of_context.weight], 1)
        gate = ContextGate(combine.weight, combine.bias, combine.of_context.bias)
        return weight, combine.of_state.bias, gate

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
        state: AttentionalLSTMState,
        implementations: Implementations,
        seeds: tuple[Seed | None, ...] | None = None,
    ) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
        """Decodes under teacher forcing.

        Args:
            inputs: target embeddings, (B, T, I), or those of the distinct words.
            memory: the source. state: state before the first position.
            implementations: implementations of the operations.
            seeds: dropout seeds from :meth:`draw_seeds`; None: drawn now.

        Returns:
            Attentional hidden vectors (B, T, H), attention (B, T, S), and the state after the last position.
        """

    def initial_state(
        self, summary: Tensor, start: Callable[[Tensor], Tensor] | None = None
    ) -> AttentionalLSTMState:
        """Computes the initial state from a ``summary`` (B, E) of the source: tanh of an affine map, or zero.

        ``start`` replaces the affine map. The tanh of its results is rounded from float64, so that other libraries
        compute the same values.
        """
        batch, size, names = summary.shape[0], self.config.size, self.started
        shape = batch, len(names), len(self.layers), size
        if self.start is None:
            vectors = summary.new_zeros(shape)
        else:
            vectors = self.start(summary) if start is None else start(summary).double()
            if self.start_gain is not None and self.start_shift is not None:
                normal = functional.layer_norm(vectors.view(batch, -1, size), (size,), eps=LAYER_NORM_EPSILON)
                vectors = normal * self.start_gain.to(normal.dtype) + self.start_shift.to(normal.dtype)
            vectors = torch.tanh(vectors).view(shape)
            if start is not None:
                vectors = vectors.to(summary.dtype)
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
        return AttentionalLSTMState(layers, torch.zeros_like(vectors[:, 0, 0]))

    def initialize(self, init: recipe.Initialization) -> None:
        """Draws initial values of all parameters."""
        self.attention.initialize(init)
        for layer in self.layers:
            assert isinstance(layer, RecurrentLayer)
            layer.initialize(init)
        initialize_linear(self.combine, init)
        if self.start is not None:
            initialize_linear(self.start, init)
        if isinstance(self.combine, GatedCombination):
            initialize_linear(self.combine.of_state, init)
            initialize_linear(self.combine.of_context, init)


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
        state: AttentionalLSTMState,
        implementations: Implementations,
        seeds: tuple[Seed | None, ...] | None = None,
    ) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
        """See :meth:`Decoder.forward`; all steps are one call of ``econmt_ops.attentional_lstm``."""
        attention, norm = self.attention, self.norm
        (seed,) = self.draw_seeds() if seeds is None else seeds
        combine, combine_bias, gate = self.output_weights()
        with account("attention"):
            coverage = None if attention.coverage is None else attention.coverage.weights(memory.values)
        weights = AttentionalLSTMWeights(
            layers=weights_of(self.layers),
            query=attention.query,
            score=attention.score,
            combine=combine,
            combine_bias=combine_bias,
            output_norm=None if norm is None else (norm.weight, norm.bias),
            gate=gate,
            coverage=coverage,
        )
        return attentional_lstm(
            inputs,
            memory.keys,
            memory.values,
            weights,
            lengths=memory.lengths,
            state=state,
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
        state: AttentionalLSTMState,
        implementations: Implementations,
        seeds: tuple[Seed | None, ...] | None = None,
    ) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
        """See :meth:`Decoder.forward`."""
        weights, how = weights_of(self.layers), implementations.recurrent("decoder")

        def run(layer: int, read: Inputs) -> tuple[Tensor, State]:
            one = slice(layer, layer + 1)
            return self.cell.run(read, weights[one], how, state=state.layers[one])

        outputs, states = run(0, inputs)
        with account("attention"):
            contexts, alignment = self.attend(outputs, memory, implementations)
        for layer, stage in enumerate(self.stages(seeds)[1:], 1):
            outputs, after = stage.run(outputs, self.dropout, partial(run, layer), [contexts])
            states += after
        combined = self.combined(outputs, contexts)
        return combined, alignment, AttentionalLSTMState(tuple(states), combined[:, -1])

    def attend(
        self, outputs: Tensor, memory: Memory, implementations: Implementations
    ) -> tuple[Tensor, Tensor]:
        """Returns contexts (B, T, E) and attention (B, T, S) of the bottom layer's outputs (B, T, H)."""
        contexts, alignment = self.attention(outputs, *memory, implementations)
        return contexts.to(outputs.dtype), alignment

    def stages(self, seeds: tuple[Seed | None, ...] | None = None) -> list[LayerStage]:
        """Returns the layers as stages of a forward pass, bottom first; those above it read the contexts too."""
        stages = list[LayerStage]()
        for layer, seed in zip(self.layers, (None, *(seeds or self.draw_seeds())), strict=True):
            assert isinstance(layer, RecurrentLayer)
            stages.append(layer.stage(seed, residual=self.config.residual and bool(stages)))
        return stages

    def combined(self, outputs: Tensor, contexts: Tensor) -> Tensor:
        """Computes attentional hidden vectors (B, T, H) from top-layer outputs (B, T, H) and contexts (B, T, E)."""
        return torch.tanh(self.combine(torch.cat([outputs, contexts], dim=-1)))
