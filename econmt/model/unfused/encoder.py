"""Encoder whose layers compute one time step at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from econmt.config import recipe
from econmt.model.encoder import Encoder
from econmt.model.implementations import Implementations
from econmt.model.layers import RecurrentLayer
from econmt.model.unfused.layers import StepDropout, UnfusedLayer
from econmt_ops.core.repeated import Inputs, expanded


class UnfusedEncoder(Encoder):
    """Encoder with residual connections from any layer on, dropout within steps, zoneout and LHUC if ``lhuc``."""

    def __init__(
        self, config: recipe.EncoderSection, input_size: int, dropout: recipe.Dropout, *, lhuc: bool
    ) -> None:
        self._within, self._lhuc = StepDropout.of(dropout), lhuc
        super().__init__(config, input_size, dropout)

    @property
    def prepacked(self) -> bool:
        """See :class:`Encoder`."""
        return False

    def make_layer(self, width: int, size: int) -> RecurrentLayer:
        """See :class:`Encoder`."""
        return UnfusedLayer(width, size, self._within, lhuc=self._lhuc)

    def forward(
        self, inputs: Inputs, lengths: Tensor, implementations: Implementations
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Encoder`."""
        recompute = implementations.recomputes("encoder")
        outputs = expanded(inputs)
        last = outputs
        for number, directions in enumerate(self._layers()):
            below = outputs if number == 0 else self.dropout(outputs)
            results = [
                layer(below, lengths, reverse=reverse, recompute=recompute) for layer, reverse in directions
            ]
            outputs, last = (torch.cat(parts, dim=-1) for parts in zip(*results, strict=True))
            if self.config.residual and number + 1 >= self.config.first_residual_layer:
                outputs = outputs + below
        return self.dropout(outputs), last

    def _layers(self) -> list[list[tuple[nn.Module, bool]]]:
        """Returns the directions of each layer, bottom first, each with True if it reads from the end."""
        both = zip(self.forward_layers, self.backward_layers, strict=True)
        layers: list[list[tuple[nn.Module, bool]]] = [[(ahead, False), (back, True)] for ahead, back in both]
        return layers + [[(layer, self.config.reverse_input)] for layer in self.upper_layers]
