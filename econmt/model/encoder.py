"""The encoder: a stack of recurrent layers over the source sentence.

Shapes: B batch, S source positions, I embedding size, E encoder size (the width of every layer's output).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from econmt.config import recipe
from econmt.model.cells import CELLS
from econmt.model.implementations import Implementations
from econmt.model.layers import RecurrentLayer, SeededDropout, make_layer, weights_of
from econmt_ops.core.dropout import Seed
from econmt_ops.core.repeated import Inputs


class EncoderSeeds(NamedTuple):
    """Seeds of a forward pass's dropout masks, in the order in which they are drawn; None where nothing is dropped.

    Attributes:
        below: of what layers read that run one by one, bottom first.
        stack: of what the upper layers of a stack read that runs at once.
        output: of the outputs.
    """

    below: tuple[Seed | None, ...]
    stack: Seed | None
    output: Seed | None


class Encoder(nn.Module):
    """Stacked layers of a cell of which the bottom one, or every layer, may read the source in both directions.

    ``reverse_input`` makes the layers of one direction read from the end of the sentence; a layer of two directions
    reads both ways in any case. Outputs stay at the positions of their words.
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
                self.forward_layers.append(self.make_layer(width, half))
                self.backward_layers.append(self.make_layer(width, half))
            else:
                self.upper_layers.append(self.make_layer(width, config.size))

    @property
    def prepacked(self) -> bool:
        """True if searches have an encoder of their own for it, with packed weights."""
        return self.cell.prepacked

    def make_layer(self, width: int, size: int) -> RecurrentLayer:
        """The parameters of a layer that reads ``width`` values and has ``size`` units."""
        return make_layer(self.config, width, size)

    @property
    def residual_from_bottom(self) -> bool:
        """True if the lowest unidirectional layer has a residual connection; a stack adds from its second layer on."""
        return self.config.residual and len(self.forward_layers) > 0

    def draw_seeds(self) -> EncoderSeeds:
        """Seeds for a forward pass: the same draws, whoever computes which part of it."""
        pairs, upper = len(self.forward_layers), len(self.upper_layers)
        alone = max(0, pairs - 1)
        if pairs and upper:
            alone += upper if self.residual_from_bottom else 1
        below = tuple(self.dropout.draw() for _ in range(alone))
        at_once = upper > 1 and not self.residual_from_bottom
        return EncoderSeeds(below, self.dropout.draw() if at_once else None, self.dropout.draw())

    def forward(
        self, inputs: Inputs, lengths: Tensor, implementations: Implementations
    ) -> tuple[Tensor, Tensor]:
        """Encode a batch.

        Args:
            inputs: (B, S, I) source embeddings, or those of the distinct words. lengths: (B,) words of each row.
            implementations: of the ops.

        Returns:
            The outputs (B, S, E) of the top layer, zero past a row's length, and its last hidden state (B, E).
        """
        how = implementations.for_encoder()
        seeds = self.draw_seeds()
        below_seeds = iter(seeds.below)
        stack = weights_of(self.upper_layers)
        pairs = list(zip(weights_of(self.forward_layers), weights_of(self.backward_layers), strict=True))
        if not pairs:
            outputs, last = self._run(stack, inputs, lengths, how, seeds.stack, residual=self.config.residual)
            return self.dropout(outputs, seeds.output), last
        outputs, last = self.cell.run_both_ways(inputs, pairs[0], lengths, how)
        for pair in pairs[1:]:
            below = self.dropout(outputs, next(below_seeds))
            outputs, last = self.cell.run_both_ways(below, pair, lengths, how)
            if self.config.residual:
                outputs = outputs + below
        if stack and not self.config.residual:
            below = self.dropout(outputs, next(below_seeds))
            outputs, last = self._run(stack, below, lengths, how, seeds.stack, residual=False)
        elif stack:
            # A stack adds its input from its second layer on; here the first one adds too.
            for weights in stack:
                below = self.dropout(outputs, next(below_seeds))
                outputs, last = self._run((weights,), below, lengths, how, None, residual=False)
                outputs = outputs + below
        return self.dropout(outputs, seeds.output), last

    def _run(
        self,
        stack: tuple[Any, ...],
        inputs: Inputs,
        lengths: Tensor,
        how: dict[str, Any],
        seed: Seed | None,
        residual: bool,
    ) -> tuple[Tensor, Tensor]:
        """Layers of one direction: outputs (B, S, E) and the top layer's last hidden state (B, E)."""
        outputs, states = self.cell.run(
            inputs,
            stack,
            how,
            lengths=lengths,
            reverse=self.config.reverse_input,
            residual=residual,
            dropout=0.0 if seed is None else self.dropout.probability,
            dropout_seed=seed,
            variational=self.dropout.variational,
        )
        return outputs, self.cell.last(outputs, states, lengths, self.config.reverse_input)

    def initialize(self, init: recipe.Initialization) -> None:
        """Draw first values of all parameters."""
        for layers in (self.forward_layers, self.backward_layers, self.upper_layers):
            for layer in layers:
                assert isinstance(layer, RecurrentLayer)
                layer.initialize(init)
