"""The encoder: a stack of recurrent layers over the source sentence.

Shapes: B batch, S source positions, I embedding size, E encoder size (the width of every layer's output).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from econmt import recipe
from econmt.model.cells import CELLS
from econmt.model.implementations import Implementations
from econmt.model.layers import RecurrentLayer, SeededDropout, draw_seed, make_layer, weights_of
from econmt_ops.core.repeated import Inputs


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
                self.forward_layers.append(make_layer(config, width, half))
                self.backward_layers.append(make_layer(config, width, half))
            else:
                self.upper_layers.append(make_layer(config, width, config.size))

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
        stack = weights_of(self.upper_layers)
        pairs = list(zip(weights_of(self.forward_layers), weights_of(self.backward_layers), strict=True))
        if not pairs:
            outputs, last = self._run(stack, inputs, lengths, how, residual=self.config.residual)
            return self.dropout(outputs), last
        outputs, last = self.cell.run_both_ways(inputs, pairs[0], lengths, how)
        for pair in pairs[1:]:
            below = self.dropout(outputs)
            outputs, last = self.cell.run_both_ways(below, pair, lengths, how)
            if self.config.residual:
                outputs = outputs + below
        if stack and not self.config.residual:
            outputs, last = self._run(stack, self.dropout(outputs), lengths, how, residual=False)
        elif stack:
            # A stack adds its input from its second layer on; here the first one adds too.
            for weights in stack:
                below = self.dropout(outputs)
                outputs, last = self._run((weights,), below, lengths, how, residual=False)
                outputs = outputs + below
        return self.dropout(outputs), last

    def _run(
        self,
        stack: tuple[Any, ...],
        inputs: Inputs,
        lengths: Tensor,
        how: dict[str, Any],
        residual: bool,
    ) -> tuple[Tensor, Tensor]:
        """Layers of one direction: outputs (B, S, E) and the top layer's last hidden state (B, E)."""
        probability = self.dropout.probability if self.training and len(stack) > 1 else 0.0
        outputs, states = self.cell.run(
            inputs,
            stack,
            how,
            lengths=lengths,
            reverse=self.config.reverse_input,
            residual=residual,
            dropout=probability,
            dropout_seed=draw_seed() if probability > 0.0 else None,
            variational=self.dropout.variational,
        )
        return outputs, self.cell.last(outputs, states, lengths, self.config.reverse_input)

    def initialize(self, init: recipe.Initialization) -> None:
        """Draw first values of all parameters."""
        for layers in (self.forward_layers, self.backward_layers, self.upper_layers):
            for layer in layers:
                assert isinstance(layer, RecurrentLayer)
                layer.initialize(init)
