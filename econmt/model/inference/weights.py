"""A decoder's weights as searches read them, for tensors, for the C library and for the exported runtime."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from econmt.model.decoder import Decoder
from econmt.model.layers import weights_of
from econmt_ops.core.low_rank import columns
from econmt_ops.core.weights import Matrix


class SearchWeights(NamedTuple):
    """Weights of one step, in which products of the same input are joined.

    Shapes: G gates, H decoder size, I embedding width, A attention size, E encoder size.

    Attributes:
        word: (G H, I), the word's columns of the bottom layer's input weight.
        fed: (G H, H), the columns of the previous output; None without input feeding.
        query: (A, H), a product of its own that makes queries of the bottom layer's state; None where ``own`` makes
            them, or where states are queries.
        own: (asked + H, H), product with the top layer's state: queries first, then its share of the output.
        own_bias: (asked + H,), zeros for the queries.
        asked: Number of rows of ``own`` that make queries, A or 0.
        values: (H, E), product with the context that gives its share of the output.
        contexts: True if the upper layers read the context, whose attention looks from the bottom layer.
    """

    word: Matrix
    fed: Matrix | None
    query: Tensor | None
    own: Tensor
    own_bias: Tensor
    asked: int
    values: Tensor
    contexts: bool

    @classmethod
    def of(cls, decoder: Decoder, query: Tensor | None) -> SearchWeights:
        """Derives the weights.

        Args:
            decoder: Decoder of a model whose layers have one input weight each.
            query: (A, H) the attention's query weight, or a multiple of it; None: states are queries.
        """
        config = decoder.config
        bottom = weights_of(decoder.layers)[0].input
        read = bottom.shape[1]
        width = read - config.size if config.input_feeding else read
        contexts = not config.input_feeding and config.layers > 1
        weight, bias = decoder.combine.weight.detach(), decoder.combine.bias.detach()
        own, asked = weight[:, : config.size], 0
        if query is not None and not contexts:
            query, asked = query.detach(), len(query)
            own, bias = torch.cat([query, own]), torch.cat([bias.new_zeros(asked), bias])
        return cls(
            columns(bottom, 0, width),
            columns(bottom, width, read) if config.input_feeding else None,
            query.detach() if query is not None and contexts else None,
            own,
            bias,
            asked,
            weight[:, config.size :],
            contexts,
        )
