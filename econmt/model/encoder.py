"""The encoder: a stack of LSTM layers over the source sentence.

Shapes: B batch, S source positions, I embedding size, E encoder size (the width of every layer's output).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from econmt import recipe
from econmt.model.implementations import Implementations
from econmt.model.layers import LSTMLayer, SeededDropout, draw_seed, weights_of
from econmt_ops import bidirectional_lstm, lstm
from econmt_ops.core.repeated import Inputs
from econmt_ops.core.weights import AnyLSTMWeights


class Encoder(nn.Module):
    """Stacked LSTM whose bottom layer, or every layer, may read the source in both directions.

    ``reverse_input`` makes the layers of one direction read from the end of the sentence; a layer of two directions
    reads both ways in any case. Outputs stay at the positions of their words.
    """

    def __init__(self, config: recipe.EncoderSection, input_size: int, dropout: recipe.Dropout) -> None:
        super().__init__()
        self.config = config
        self.dropout = SeededDropout(dropout.layers, dropout.variational)
        both = {"none": 0, "bottom": 1, "all": config.layers}[config.bidirectional]
        half = config.size // 2
        self.forward_layers = nn.ModuleList()
        self.backward_layers = nn.ModuleList()
        self.upper_layers = nn.ModuleList()
        for layer in range(config.layers):
            width = input_size if layer == 0 else config.size
            if layer < both:
                self.forward_layers.append(LSTMLayer(width, half, config.rank))
                self.backward_layers.append(LSTMLayer(width, half, config.rank))
            else:
                self.upper_layers.append(LSTMLayer(width, config.size, config.rank))

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
        outputs, last = self._run_both_ways(pairs[0], inputs, lengths, how)
        for pair in pairs[1:]:
            below = self.dropout(outputs)
            outputs, last = self._run_both_ways(pair, below, lengths, how)
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

    def _run_both_ways(
        self,
        pair: tuple[AnyLSTMWeights, AnyLSTMWeights],
        inputs: Inputs,
        lengths: Tensor,
        how: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """A layer of two directions: outputs (B, S, E) and both last hidden states (B, E)."""
        outputs, states = bidirectional_lstm(inputs, *pair, lengths=lengths, **how)
        return outputs, torch.cat([states[0][0], states[1][0]], dim=-1)

    def _run(
        self,
        stack: tuple[AnyLSTMWeights, ...],
        inputs: Inputs,
        lengths: Tensor,
        how: dict[str, Any],
        residual: bool,
    ) -> tuple[Tensor, Tensor]:
        """Layers of one direction: outputs (B, S, E) and the top layer's last hidden state (B, E)."""
        probability = self.dropout.probability if self.training and len(stack) > 1 else 0.0
        outputs, states = lstm(
            inputs,
            stack,
            lengths=lengths,
            reverse=self.config.reverse_input,
            residual=residual,
            dropout=probability,
            dropout_seed=draw_seed() if probability > 0.0 else None,
            variational=self.dropout.variational,
            **how,
        )
        return outputs, states[-1][0]

    def initialize(self, init: recipe.Initialization) -> None:
        """Draw first values of all parameters."""
        for layers in (self.forward_layers, self.backward_layers, self.upper_layers):
            for layer in layers:
                assert isinstance(layer, LSTMLayer)
                layer.initialize(init)
