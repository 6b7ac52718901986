"""The encoder: a stack of recurrent layers over the source sentence.

Shapes: B batch, S source positions, I embedding size, E encoder size (the width of every layer's output).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from econmt.config import recipe
from econmt.model.cells import CELLS
from econmt.model.implementations import Implementations
from econmt.model.layers import LayerStage, RecurrentLayer, SeededDropout, make_layer, weights_of
from econmt_ops.products.dropout import Seed
from econmt_ops.products.repeated import Inputs


class EncoderSeeds(NamedTuple):
    """Dropout seeds of a forward pass in the order of drawing; None where nothing is dropped.

    Attributes:
        below: for inputs of layers that run one by one, bottom first.
        stack: for inputs of the upper layers of a stack that runs in one operation.
        output: for the outputs.
    """

    below: tuple[Seed | None, ...]
    stack: Seed | None
    output: Seed | None


class Encoder(nn.Module):
    """Stack of layers of one cell, of which the bottom one or all may be bidirectional.

    With ``reverse_input`` unidirectional layers read a sentence from its end. Outputs keep the order of the words.
    """

    def __init__(self, config: recipe.EncoderSection, input_size: int, dropout: recipe.Dropout) -> None:
        super().__init__()
        self.config = config
        self.cell = CELLS[config.cell]
        self.dropout = SeededDropout(dropout.layers, dropout.variational)
        both = {"none": 0, "bottom": 1, "all": config.layers}[config.bidirectional]
        half = config.size // 2
        self.forward_layers = nn.ModuleList()
        self.backward_layers = nn.ModuleList()
        self.upper_layers = nn.ModuleList()
        for layer in range(config.layers):
            width = input_size if layer == 0 else config.size
            if layer < both:
                self.forward_layers.append(make_layer(config.cell, width, half, config.rank))
                self.backward_layers.append(make_layer(config.cell, width, half, config.rank))
            else:
                self.upper_layers.append(make_layer(config.cell, width, config.size, config.rank))

    @property
    def residual_from_bottom(self) -> bool:
        """True if the lowest unidirectional layer has a residual connection, which a stack operation does not add."""
        return self.config.residual and len(self.forward_layers) > 0

    def draw_seeds(self) -> EncoderSeeds:
        """Draws the dropout seeds of a forward pass, in an order that does not depend on who computes which part."""
        pairs, upper = len(self.forward_layers), len(self.upper_layers)
        alone = max(0, pairs - 1)
        if pairs and upper:
            alone += upper if self.residual_from_bottom else 1
        below = tuple(self.dropout.draw() for _ in range(alone))
        at_once = upper > 1 and not self.residual_from_bottom
        return EncoderSeeds(below, self.dropout.draw() if at_once else None, self.dropout.draw())

    def stages(self, seeds: EncoderSeeds) -> list[LayerStage]:
        """Returns the unidirectional layers as stages of a forward pass, bottom first."""
        pairs, stages = len(self.forward_layers), list[LayerStage]()
        for number, layer in enumerate(self.upper_layers):
            assert isinstance(layer, RecurrentLayer)
            if pairs and (number == 0 or self.residual_from_bottom):
                seed, mask = seeds.below[pairs - 1 + number], -1
            else:
                seed, mask = (seeds.stack if number else None), number
            residual = self.config.residual and (number > 0 or self.residual_from_bottom)
            stages.append(layer.stage(seed, mask, residual=residual))
        return stages

    def forward(
        self, inputs: Inputs, lengths: Tensor, implementations: Implementations
    ) -> tuple[Tensor, Tensor]:
        """Encodes embeddings (B, S, I), or those of the distinct words, of sentences of ``lengths`` (B,).

        Returns:
            Outputs of the top layer (B, S, E), zero at padded positions, and its last hidden state (B, E).
        """
        how, half = implementations.recurrent("encoder"), self.config.size // 2
        seeds = self.draw_seeds()
        below_seeds = iter(seeds.below)
        stack = weights_of(self.upper_layers)
        pairs = list(zip(weights_of(self.forward_layers), weights_of(self.backward_layers), strict=True))
        if not pairs:
            outputs, last = self._run(stack, lengths, how, seeds.stack, inputs, residual=self.config.residual)
            return self.dropout(outputs, seeds.output), last
        outputs, last = self.cell.run_both_ways(inputs, pairs[0], lengths, how, half)
        for pair in pairs[1:]:
            below = self.dropout(outputs, next(below_seeds))
            outputs, last = self.cell.run_both_ways(below, pair, lengths, how, half)
            if self.config.residual:
                outputs = outputs + below
        if stack and not self.config.residual:
            below = self.dropout(outputs, next(below_seeds))
            outputs, last = self._run(stack, lengths, how, seeds.stack, below, residual=False)
        elif stack:
            # A stack operation has no residual connection around its first layer.
            for stage in self.stages(seeds):
                outputs, last = stage.run(
                    outputs,
                    self.dropout,
                    partial(self._run, (stage.weights(),), lengths, how, None, residual=False),
                )
        return self.dropout(outputs, seeds.output), last

    def _run(
        self,
        stack: tuple[Any, ...],
        lengths: Tensor,
        how: dict[str, Any],
        seed: Seed | None,
        inputs: Inputs,
        *,
        residual: bool,
    ) -> tuple[Tensor, Tensor]:
        """Runs unidirectional layers. Returns outputs (B, S, E) and the top layer's last hidden state (B, E)."""
        outputs, states = self.cell.run(
            inputs,
            stack,
            how,
            self.config.size,
            lengths=lengths,
            reverse=self.config.reverse_input,
            residual=residual,
            dropout=0.0 if seed is None else self.dropout.probability,
            dropout_seed=seed,
            variational=self.dropout.variational,
        )
        return outputs, self.cell.last(outputs, states, lengths, self.config.reverse_input, residual)

    def initialize(self, init: recipe.Initialization) -> None:
        """Draws initial values of all parameters."""
        for layers in (self.forward_layers, self.backward_layers, self.upper_layers):
            for layer in layers:
                assert isinstance(layer, RecurrentLayer)
                layer.initialize(init)
