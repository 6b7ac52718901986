"""What the forward and the backward pass of the recomputing attentional LSTM share.

Shapes: B batch, T steps, S source positions, H hidden, A attention size, E width of the values, L layers, K steps
of a block. Inside, time comes first: (T, B, .), so that the rows of a step are contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.blocks import split_blocks
from econmt_ops.dropout import apply_dropout, layer_keep_masks
from econmt_ops.masking import padding_mask, zero_padding
from econmt_ops.precision import accumulate_dtype
from econmt_ops.scores import Scores
from econmt_ops.steps import Steps
from econmt_ops.weights import LSTMWeights


class Options(NamedTuple):
    """The options of an attentional LSTM that are not tensors."""

    residual: bool
    dropout: float
    seed: int
    variational: bool
    scale: float
    stash: str


class Problem:
    """The tensors of one call, prepared once: masked keys and values, joined weights, dropout masks.

    Attributes:
        inputs: (T, B, I). values: (B, S, E), zero at padded positions. scores: of the attention.
        projected: (B, S, H), the values times their part of the combination: sum_s alpha_s projected_s is the
            context's share of what tanh reads to give o.
        recurrent: the weight (4H, 2H) with which the bottom layer reads [o ; h] of the step before.
        after: the weight (A + H, H) from the top layer to the query and its share of o (without query: (H, H)).
    """

    def __init__(
        self,
        inputs: Tensor,
        keys: Tensor,
        values: Tensor,
        layers: list[LSTMWeights],
        query: Tensor | None,
        score: Tensor | None,
        combine: Tensor,
        combine_bias: Tensor | None,
        norm: tuple[Tensor, Tensor] | None,
        lengths: Tensor | None,
        options: Options,
        steps: Steps,
    ) -> None:
        self.run = steps
        self.batch, self.steps, self.width = inputs.shape
        self.hidden = layers[0].hidden.shape[1]
        self.dtype, self.accumulate = inputs.dtype, accumulate_dtype(inputs.dtype)
        self.options = options
        self.padding = None if lengths is None else padding_mask(lengths, keys.shape[1], keys.device)
        self.inputs = inputs.transpose(0, 1)
        self.scores = Scores(
            zero_padding(keys, self.padding), score, norm, options.scale, self.padding, steps
        )
        self.values = zero_padding(values, self.padding)
        self.layers = layers
        self.query = query
        self.combine, self.combine_bias = combine, combine_bias
        self.from_top, self.from_values = combine[:, : self.hidden], combine[:, self.hidden :]
        self.projected = functional.linear(self.values, self.from_values)
        self.input_weight = layers[0].input[:, : self.width]
        self.recurrent = torch.cat([layers[0].input[:, self.width :], layers[0].hidden], 1)
        self.after = self.from_top if query is None else torch.cat([query, self.from_top], 0)
        self.masks = layer_keep_masks(
            len(layers),
            self.batch,
            self.steps,
            self.hidden,
            options.dropout,
            options.seed,
            options.variational,
            inputs.device,
        )
        self.blocks = split_blocks(self.steps, self.batch, self.hidden, self.accumulate)

    def drop(self, layer: int, values: Tensor, begin: int, end: int) -> Tensor:
        """Dropout on what a layer reads at steps begin to end; values (K, B, H), and its own transpose."""
        mask = self.masks[layer]
        if mask is None:
            return values
        mask = mask if mask.shape[1] == 1 else mask[:, begin:end]
        return apply_dropout(values, mask.transpose(0, 1), self.options.dropout)

    def split_after(self, both: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """The query (.., A) and the top layer's share of o (.., H), from the product with ``after``."""
        if self.query is None:
            return top, both
        size = self.query.shape[0]
        return both[..., :size], both[..., size:]
