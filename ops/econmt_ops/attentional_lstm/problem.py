"""What the forward and the backward pass of the recomputing attentional LSTM share.

Shapes: B batch, T steps, S source positions, H hidden, A attention size, E width of the values, L layers, K steps
of a block. Inside, time comes first: (T, B, .), so that the rows of a step are contiguous.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.additive_attention.scores import Scores
from econmt_ops.backends.steps import Steps
from econmt_ops.core.chunks import split_blocks, split_rows
from econmt_ops.core.dropout import apply_dropout, layer_keep_masks
from econmt_ops.core.gemm import Product
from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.low_rank import LowRankProduct, columns, joined, linear, product_of
from econmt_ops.core.packed import is_available
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.repeated import look_up
from econmt_ops.core.weights import AnyLSTMWeights, Matrix, cast_weights


class Options(NamedTuple):
    """The options of an attentional LSTM that are not tensors."""

    residual: bool
    dropout: float
    seed: int
    variational: bool
    scale: float
    stash: str


class Problem:
    """The tensors of one call, and what both passes make of them.

    Attributes:
        inputs: (T, B, I); or, where places are given, the distinct rows (N, I).
        places: (T, B), which row stands where, or None.
        scores: of the attention. padding: (B, S), True at padded positions, or None.
        from_input, from_output: the parts (4H, I) and (4H, H) of the bottom input weight that read inputs and o.
        keeps_activated: whether gates are kept after their nonlinearities: in 16 bits that would lose accuracy, so
            there the sums before them are kept, which have been rounded anyway.
        from_top, from_values: the parts (H, H) and (H, E) of the combination that read the stack and the context.
    """

    def __init__(
        self,
        inputs: Tensor,
        places: Tensor | None,
        keys: Tensor,
        values: Tensor,
        layers: list[AnyLSTMWeights],
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
        self.inputs = inputs.transpose(0, 1) if places is None else inputs
        self.places = None if places is None else places.t()
        by_time = self.inputs if self.places is None else self.places
        self.steps, self.batch, self.width = *by_time.shape[:2], inputs.shape[-1]
        self.hidden = layers[0].hidden.shape[1]
        self.dtype, self.accumulate = inputs.dtype, accumulate_dtype(inputs.dtype)
        self.options = options
        self.keeps_activated = self.dtype == self.accumulate
        self.padding = None if lengths is None else padding_mask(lengths, keys.shape[1], keys.device)
        # Additive attention gets clean keys, see clean_keys; those of dot attention may be the values.
        keys = zero_padding(keys, self.padding) if score is None else keys
        self.scores = Scores(keys, score, norm, options.scale, self.padding, steps)
        self.values = values
        # Weights may come in another type, so that nobody keeps a copy of them from one pass to the other.
        self.layers = [cast_weights(layer, self.dtype) for layer in layers]
        self.query = None if query is None else query.to(self.dtype)
        combine = combine.to(self.dtype)
        self.combine = combine
        self.combine_bias = None if combine_bias is None else combine_bias.to(self.dtype)
        self.from_top, self.from_values = combine[:, : self.hidden], combine[:, self.hidden :]
        bottom = self.layers[0].input
        self.from_input = columns(bottom, 0, self.width)
        self.from_output = columns(bottom, self.width, bottom.shape[1])
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

    def product(self, weight: Matrix, bias: Tensor | None = None) -> Product | LowRankProduct:
        """The product with a weight that every step makes once."""
        layout = "packed" if is_available(self.inputs) else "row"
        return product_of(weight, bias, layout, calls=self.steps)

    def joint(self, layer: int) -> Matrix:
        """What makes a layer's gates in a step of [what it reads there ; h of the step before]: (4H, 2H).

        The bottom layer reads o of the step before; its inputs' share is made for many steps at once.
        """
        weights = self.layers[layer]
        return joined(self.from_output if layer == 0 else weights.input, weights.hidden)

    def projected(self) -> Tensor:
        """The values times their part of the combination (B, S, H), zero at padded positions.

        sum_s alpha_s projected_s is the context's share of what tanh reads to give o: one product a call instead of
        one a step.
        """
        # As rows: values whose batch is not their first axis in memory would go to a batched product, which copies the
        # matrix once a sentence.
        rows = functional.linear(self.values.reshape(-1, self.values.shape[2]), self.from_values)
        projected = rows.view(*self.values.shape[:2], self.hidden)
        if self.padding is not None:
            projected.masked_fill_(self.padding.unsqueeze(2), 0.0)
        return projected

    def contexts(self, attention: Tensor) -> Tensor:
        """The contexts of a block of steps (K, B, E) from their attention weights (K, B, S)."""
        weights = attention.transpose(0, 1)
        if self.padding is None:
            return torch.bmm(weights, self.values).transpose(0, 1)
        contexts = self.values.new_empty(*weights.shape[:2], self.values.shape[2])
        width = self.values.shape[2] * self.values.itemsize
        # In parts, because zeros for what lies in the padding, NaN perhaps, take a copy of the values.
        for rows in split_rows(len(self.values), self.values.shape[1], width):
            contexts[rows] = torch.bmm(weights[rows], zero_padding(self.values[rows], self.padding[rows]))
        return contexts.transpose(0, 1)

    def read(self, begin: int, end: int) -> Tensor:
        """Inputs (K, B, I) of a block of steps, contiguous, or their places (K, B)."""
        return (self.inputs if self.places is None else self.places)[begin:end].contiguous()

    def bottom_gates(self, inputs: Tensor) -> Tensor:
        """The share of inputs, as :meth:`read` gives them, in the bottom layer's gates, with the bias: (K, B, 4H)."""
        if self.places is not None:
            return look_up(self.table, inputs)
        return linear(inputs, self.from_input, self.layers[0].bias)

    @functools.cached_property
    def table(self) -> Tensor:
        """The share of each distinct row in the bottom layer's gates, with the bias: (N, 4H)."""
        return linear(self.inputs, self.from_input, self.layers[0].bias)

    def drop(self, layer: int, values: Tensor, begin: int, end: int) -> Tensor:
        """Dropout on what a layer reads at steps begin to end; values (K, B, H), and its own transpose."""
        mask = self.masks[layer]
        if mask is None:
            return values
        mask = mask if mask.shape[1] == 1 else mask[:, begin:end]
        return apply_dropout(values, mask.transpose(0, 1), self.options.dropout)
