"""Which implementation of each op a model runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from econmt import recipe


class Implementations(NamedTuple):
    """Names of implementations as ``econmt_ops`` knows them; "auto" leaves the choice to it.

    They change how much memory and time a model takes and nothing of what it computes but rounding.

    Attributes:
        attention: of the attention; with input feeding, of the whole decoder loop.
        lstm: of the LSTM layers. With input feeding the loop keeps the gates of the decoder's layers if this is
            "reference", as plain autograd would.
        output: of the output layer and its loss.
        stash: how much the recomputing LSTMs keep: "outputs", "attention", "cells", "gates", or "auto".
    """

    attention: str = "auto"
    lstm: str = "auto"
    output: str = "auto"
    stash: str = "auto"

    @classmethod
    def of(cls, ops: recipe.Ops) -> Implementations:
        """Those that a recipe asks for."""
        return cls(ops.attention, ops.lstm, ops.output, ops.stash)

    def for_lstm(self) -> dict[str, Any]:
        """Keyword arguments of ``econmt_ops.lstm`` and ``bidirectional_lstm``."""
        return _arguments(self.lstm, self.stash)

    def for_loop(self) -> dict[str, Any]:
        """Keyword arguments of ``econmt_ops.attentional_lstm``."""
        return _arguments(self.attention, "gates" if self.lstm == "reference" else self.stash)


def _arguments(implementation: str, stash: str) -> dict[str, Any]:
    # The reference keeps what autograd keeps, whatever the level.
    if implementation == "reference" or stash == "auto":
        return {"implementation": implementation}
    return {"implementation": implementation, "stash": stash}
