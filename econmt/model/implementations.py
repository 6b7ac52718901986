"""Which implementation of each op a model runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from econmt import recipe


class Implementations(NamedTuple):
    """Names of implementations as ``econmt_ops`` knows them; "auto" leaves the choice to it.

    They change how much memory and time a model takes and nothing of what it computes but rounding.

    Attributes:
        encoder: of the encoder's LSTM layers.
        decoder: of the decoder: with input feeding its whole loop, attention included; without, its LSTM layers.
        attention: of the attention of a decoder without input feeding.
        output: of the output layer and its loss.
        stash: how much the recomputing LSTMs keep: "outputs", "attention", "cells", "gates", or "auto".
    """

    encoder: str = "auto"
    decoder: str = "auto"
    attention: str = "auto"
    output: str = "auto"
    stash: str = "auto"

    @classmethod
    def of(cls, ops: recipe.Ops) -> Implementations:
        """Those that a recipe asks for."""
        return cls(**ops.model_dump())

    @classmethod
    def everywhere(cls, name: str, stash: str = "auto") -> Implementations:
        """The same one for all ops."""
        return cls(name, name, name, name, stash)

    def for_encoder(self) -> dict[str, Any]:
        """Keyword arguments of ``econmt_ops.lstm`` and ``bidirectional_lstm``."""
        return _arguments(self.encoder, self.stash)

    def for_decoder(self) -> dict[str, Any]:
        """Keyword arguments of ``attentional_lstm``, or of a decoder's ``lstm`` without input feeding."""
        return _arguments(self.decoder, self.stash)

    def for_attention(self) -> dict[str, Any]:
        """Keyword arguments of ``econmt_ops.additive_attention``."""
        return {"implementation": self.attention}

    def for_output(self) -> dict[str, Any]:
        """Keyword arguments of ``econmt_ops.linear_cross_entropy``."""
        return {"implementation": self.output}


def _arguments(implementation: str, stash: str) -> dict[str, Any]:
    # The reference keeps what autograd keeps, whatever the level.
    if implementation == "reference" or stash == "auto":
        return {"implementation": implementation}
    return {"implementation": implementation, "stash": stash}
