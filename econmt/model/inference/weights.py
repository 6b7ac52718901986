"""Joined decoder weights for searches with tensor operations, the C library and the exported runtime."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.model.decoder import Decoder
from econmt.model.layers import weights_of
from econmt_ops import GRUWeights, LSTMWeights
from econmt_ops.core.weights import Matrix
from econmt_ops.products.low_rank import columns


def search_layers(decoder: Decoder) -> tuple[Any, ...]:
    """Returns the weights of a decoder's layers, with four gates in GRUs, whose products of inputs and h are summed.

    These are r, z, and n twice: its share of the inputs, and that of h, which r multiplies. The other rows are zero.
    """
    layers = weights_of(decoder.layers)
    return tuple(map(_four_gates, layers)) if decoder.config.cell == "gru" else layers


def _four_gates(layer: GRUWeights) -> LSTMWeights:
    rz = 2 * layer.hidden.shape[1]
    nothing = torch.zeros_like(layer.hidden[rz:])
    return LSTMWeights(
        torch.cat([layer.input, torch.zeros_like(layer.input[rz:])]),
        torch.cat([layer.hidden[:rz], nothing, layer.hidden[rz:]]),
        torch.cat([layer.bias[:rz] + layer.hidden_bias[:rz], layer.bias[rz:], layer.hidden_bias[rz:]]),
    )


class SearchWeights(NamedTuple):
    """Weights of one decoder step, in which products with the same input are joined.

    Shapes: G gates, H decoder size, I embedding width, A attention size, E encoder size.

    Attributes:
        word: columns of the bottom layer's input weight for the word, (G H, I).
        fed: columns of the bottom layer's input weight for the previous output, (G H, H); None without input feeding.
        query: weight that computes queries from the bottom layer's state, (A, H); None if ``top`` computes them, or if
            states are queries.
        top: weight of the product with the top layer's state: rows for queries, then rows for the output, those of a
            context gate first, (asked + H, H) or (asked + 2H, H).
        top_bias: bias of that product, zero for the queries, (asked + H,) or (asked + 2H,).
        asked: number of rows of ``top`` that compute queries, A or 0.
        values: weight of the product with the context for the output, (H, E) or (2H, E).
        context_bias: bias of the context's part of the output of a context gate, (H,); None without one.
        contexts: True if the bottom layer attends and the upper layers read its context.
    """

    word: Matrix
    fed: Matrix | None
    query: Tensor | None
    top: Tensor
    top_bias: Tensor
    asked: int
    values: Tensor
    context_bias: Tensor | None
    contexts: bool

    @classmethod
    def of(cls, decoder: Decoder, query: Tensor | None, bottom: Matrix) -> SearchWeights:
        """Derives the weights of a decoder.

        Args:
            decoder: the decoder.
            query: query weight of the attention (A, H), or a multiple of it; None: states are queries.
            bottom: input weight of the bottom layer, (G H, I) or (G H, I + H).
        """
        config = decoder.config
        read = bottom.shape[1]
        width = read - config.size if config.input_feeding else read
        contexts = not config.input_feeding and config.layers > 1
        weight, bias, gate = decoder.output_weights()
        if gate is not None:
            weight, bias = torch.cat([gate.weight, weight]), torch.cat([gate.bias, bias])
        weight, bias = weight.detach(), bias.detach()
        top, asked = weight[:, : config.size], 0
        if query is not None and not contexts:
            query, asked = query.detach(), len(query)
            top, bias = torch.cat([query, top]), torch.cat([bias.new_zeros(asked), bias])
        return cls(
            columns(bottom, 0, width),
            columns(bottom, width, read) if config.input_feeding else None,
            query.detach() if query is not None and contexts else None,
            top,
            bias,
            asked,
            weight[:, config.size :],
            None if gate is None else gate.context_bias.detach(),
            contexts,
        )
