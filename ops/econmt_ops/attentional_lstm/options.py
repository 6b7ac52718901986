"""Arguments of `econmt_ops.attentional_lstm` that its implementations take beside tensors and weights."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from econmt_ops.products.dropout import Seed
from econmt_ops.products.stack import StackOptions


class DecoderOptions(NamedTuple):
    """Options of a decoder, complete and checked, as `econmt_ops.attentional_lstm` describes them."""

    lengths: Tensor | None
    input_feeding: bool = True
    residual: bool = False
    dropout: float = 0.0
    seed: Seed | None = None
    variational: bool = False
    layer_norm: tuple[Tensor, Tensor] | None = None
    scale: float = 1.0
    clean: bool = False
    overwrites: bool = False

    def stack(self) -> StackOptions:
        """Returns the options of the LSTM layers alone."""
        return StackOptions(None, False, self.residual, self.dropout, self.seed, self.variational)
