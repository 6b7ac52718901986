"""Decoder with input feeding, one step at a time in PyTorch, for options that no fused operation supports.

Shapes: R rows, T target positions, S source positions, I embedding size, H decoder size, E encoder size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.config import recipe
from econmt.model.attention import Attention
from econmt.model.decoder import Decoder, Memory, Recurrent
from econmt.model.implementations import Implementations
from econmt.model.layers import RecurrentLayer, initialize_linear
from econmt.model.unfused.attention import UnfusedAttention
from econmt.model.unfused.layers import Masks, StepDropout, UnfusedCellLayer, UnfusedLayer, run_step
from econmt_ops.cells.attention import LAYER_NORM_EPSILON
from econmt_ops.core.dropout import Seed, apply_dropout, layer_keep_masks
from econmt_ops.core.repeated import Inputs, expanded
from econmt_ops.core.scopes import layer as account
from econmt_ops.core.weights import State


class ContextGate(nn.Linear):
    """Gate between state (H) and context (E) in the argument of tanh (Tu et al., 2017, section 3.2, "both").

    z = sigmoid(W [h; context] + b), then z * (W_h h + b_h) + (1 - z) * (W_c context + b_c).
    """

    def __init__(self, size: int, encoder_size: int) -> None:
        super().__init__(size + encoder_size, size)
        self.of_state = nn.Linear(size, size)
        self.of_context = nn.Linear(encoder_size, size)

    def forward(self, joined: Tensor) -> Tensor:
        """Maps [h; context] (R, H + E) to (R, H)."""
        gate = torch.sigmoid(super().forward(joined))
        state, context = torch.split(joined, [self.out_features, self.of_context.in_features], dim=1)
        return torch.lerp(self.of_context(context), self.of_state(state), gate)


class UnfusedDecoder(Decoder):
    """Decoder with input feeding as :class:`econmt.model.decoder.InputFeedingDecoder`, with all options."""

    is_unfused = True

    def __init__(self, model: recipe.Model) -> None:
        dropout = model.dropouts
        self._model, self._within = model, StepDropout.of(dropout)
        width = model.embedding_widths[1]
        super().__init__(model.decoder, model.attention, width, model.encoder.size, dropout)
        vectors = len(self.started) * model.decoder.layers
        self.norm = (
            nn.LayerNorm(model.decoder.size, LAYER_NORM_EPSILON) if model.layer_normalization else None
        )
        self.start_gain: nn.Parameter | None = None
        self.start_shift: nn.Parameter | None = None
        self.start_lhuc: nn.Parameter | None = None
        if self.start is not None and model.layer_normalization:
            self.start_gain = nn.Parameter(torch.ones(vectors, model.decoder.size))
            self.start_shift = nn.Parameter(torch.zeros(vectors, model.decoder.size))
        if model.lhuc in ("state_init", "all"):
            self.start_lhuc = nn.Parameter(torch.zeros(vectors, model.decoder.size))

    def make_attention(
        self, attention: recipe.AttentionSection, encoder_size: int, input_size: int
    ) -> Attention:
        """See :class:`Decoder`."""
        return UnfusedAttention(attention, encoder_size, self.config.size, input_size)

    def make_layer(self, width: int) -> RecurrentLayer:
        """See :class:`Decoder`."""
        if self.config.cell != "lstm":
            return UnfusedCellLayer(self.cell.cell, width, self.config.size)
        return UnfusedLayer(
            width, self.config.size, self._within, lhuc=self._model.lhuc in ("decoder", "all")
        )

    def make_combine(self, encoder_size: int) -> nn.Linear:
        """See :class:`Decoder`."""
        gated = self.config.context_gating
        return ContextGate(self.config.size, encoder_size) if gated else super().make_combine(encoder_size)

    def _input_widths(self, input_size: int, encoder_size: int) -> list[int]:
        upper = self.config.size + (encoder_size if self.config.attention_in_upper_layers else 0)
        return [input_size + self.config.size] + [upper] * (self.config.layers - 1)

    def draw_seeds(self) -> tuple[Seed | None, ...]:
        """See :meth:`Decoder.draw_seeds`; one seed for inputs of upper layers. Layers draw seeds within steps."""
        return (self.dropout.draw(),)

    def start_vectors(self, projected: Tensor) -> Tensor:
        """See :class:`Decoder`."""
        vectors = projected.view(len(projected), -1, self.config.size)
        if self.start_gain is not None and self.start_shift is not None:
            normal = functional.layer_norm(vectors, vectors.shape[-1:], eps=LAYER_NORM_EPSILON)
            vectors = normal * self.start_gain.to(normal.dtype) + self.start_shift.to(normal.dtype)
        vectors = torch.tanh(vectors)
        if self.start_lhuc is not None:
            vectors = vectors * (2.0 * torch.sigmoid(self.start_lhuc)).to(vectors.dtype)
        return vectors.flatten(1)

    def forward(
        self,
        inputs: Inputs,
        memory: Memory,
        state: Recurrent,
        implementations: Implementations,
        seeds: tuple[Seed | None, ...] | None = None,
    ) -> tuple[Tensor, Tensor, Recurrent]:
        """See :meth:`Decoder.forward`; with recomputation, autograd keeps only the state before each step."""
        words = expanded(inputs)
        rows, steps, _ = words.shape
        (seed,) = self.draw_seeds() if seeds is None else seeds
        probability = 0.0 if seed is None else self.dropout.probability
        between = layer_keep_masks(
            len(self.layers),
            rows,
            steps,
            self.config.size,
            probability,
            seed,
            self.dropout.variational,
            words.device,
        )
        within = [layer.draw_masks(rows, steps, words.device) for layer in self._layers]
        recompute, parameters = implementations.recomputes("decoder"), list(self.parameters())
        outputs, alignments = [], []
        current = _flat(self._begun(state, memory))
        for position in range(steps):
            masks = [
                (
                    None if mask is None else mask[:, position if mask.shape[1] > 1 else 0],
                    None if layer_masks is None else layer_masks.at(position),
                )
                for mask, layer_masks in zip(between, within, strict=True)
            ]

            def step(
                word: Tensor,
                keys: Tensor,
                values: Tensor,
                *before: Tensor,
                masks: list[tuple[Tensor | None, Masks | None]] = masks,
            ) -> tuple[Tensor, ...]:
                source = Memory(keys, values, memory.lengths)
                weights, after = self.step(word, source, self._unflat(before), masks)
                return (weights, *_flat(after))

            tensors = (words[:, position], memory.keys, memory.values, *current)
            weights, *current = run_step(step, recompute, parameters, tensors)
            alignments.append(weights)
            outputs.append(self._unflat(current).output)
        return torch.stack(outputs, 1), torch.stack(alignments, 1), self._unflat(current)

    def step(
        self,
        words: Tensor,
        memory: Memory,
        state: Recurrent,
        masks: list[tuple[Tensor | None, Masks | None]] | None = None,
    ) -> tuple[Tensor, Recurrent]:
        """Computes one step.

        Args:
            words: embeddings of the previous words, (R, I). memory: source of each row. state: state before the step.
            masks: for each layer, the dropout mask of its inputs and the masks within its step; None: no dropout.

        Returns:
            Attention (R, S) and the state after the step.
        """
        state = self._begun(state, memory)
        early = self.config.attention_in_upper_layers
        (coverage,) = state.extra or (None,)
        states, below = [], torch.cat([words, state.output.to(words.dtype)], dim=1)
        context: Tensor | None = None
        for number, layer in enumerate(self._layers):
            keep, layer_masks = (None, None) if masks is None else masks[number]
            below = apply_dropout(below, keep, self.dropout.probability)
            read = below
            if number > 0 and context is not None:
                read = torch.cat([below, context.to(below.dtype)], dim=1)
            h, after = layer.advance(read, state.layers[number], layer_masks)
            states.append(after)
            above = h
            if self.config.residual and number + 1 >= self.config.first_residual_layer:
                above = h + (words.to(h.dtype) if number == 0 else below.to(h.dtype))
            below = above
            if context is None and (early or number == len(self.layers) - 1):
                context, weights, coverage = self._attend(below, words, memory, coverage)
        assert context is not None
        combined = self.combine(torch.cat([below, context.to(below.dtype)], dim=1))
        output = torch.tanh(combined if self.norm is None else self.norm(combined)).to(combined.dtype)
        return weights, Recurrent(tuple(states), output, () if coverage is None else (coverage,))

    def _attend(
        self, states: Tensor, words: Tensor, memory: Memory, coverage: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        assert isinstance(self.attention, UnfusedAttention)
        with account("attention"):
            return self.attention.step(states, words, *memory, coverage)

    def _begun(self, state: Recurrent, memory: Memory) -> Recurrent:
        """Adds the initial coverage to a state that lacks it."""
        assert isinstance(self.attention, UnfusedAttention)
        if self.attention.coverage is None or state.extra:
            return state
        return state._replace(extra=(self.attention.coverage.first(memory.values),))

    @property
    def _layers(self) -> list[UnfusedLayer | UnfusedCellLayer]:
        return [cast(UnfusedLayer, layer) for layer in self.layers]

    def layer_states(self, parts: Sequence[Tensor]) -> tuple[State, tuple[Tensor, ...]]:
        """Divides tensors into the states of the layers and what follows them."""
        each = len(self.cell.cell.states)
        count = each * len(self.layers)
        layers = tuple(tuple(parts[number : number + each]) for number in range(0, count, each))
        return layers, tuple(parts[count:])

    def _unflat(self, parts: tuple[Tensor, ...] | list[Tensor]) -> Recurrent:
        """Converts the tensors of :func:`_flat` back to a state."""
        output, *rest = parts
        layers, extra = self.layer_states(rest)
        return Recurrent(layers, output, extra)

    def initialize(self, init: recipe.Initialization) -> None:
        """See :class:`Decoder`; normalisation and LHUC start with factors of 1."""
        super().initialize(init)
        if isinstance(self.combine, ContextGate):
            initialize_linear(self.combine.of_state, init)
            initialize_linear(self.combine.of_context, init)


def _flat(state: Recurrent) -> list[Tensor]:
    """Returns the tensors of a state as a list."""
    return [state.output, *(part for parts in state.layers for part in parts), *state.extra]
