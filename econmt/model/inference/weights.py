"""Joined decoder weights for searches with tensor operations, the C library and the exported runtime.

Shapes: G gates, H decoder size, I embedding width, A attention size, E encoder size, W width of the coverage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.model.decoder import Decoder
from econmt.model.inference.layout import dense
from econmt.model.layers import weights_of
from econmt.model.translation import TranslationModel
from econmt_ops.backends.c.search import CELL_NUMBERS
from econmt_ops.cells.protocol import Split
from econmt_ops.core.weights import Matrix
from econmt_ops.products.low_rank import columns

COVERAGES = ("none", "count", "fertility", "tanh", "sigmoid", "relu", "softrelu", "gru")
"""Updates of the coverage in the order of kernels.h."""
Affine = tuple[Tensor, Tensor | None]
"""Weight (N, K) and bias (N,), or no bias, of a product."""


class SearchWeights(NamedTuple):
    """Weights of one decoder step, in which products with the same input are joined.

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


def split_weights(cell: Any, weights: Any) -> Split:
    """Separates a layer's weights by the operation that reads them; SSRU has no ``hidden``."""
    if hasattr(cell, "split"):
        split: Split = cell.split(weights)
        return split
    return Split(weights.input, getattr(weights, "hidden", None), weights.bias, None, ())


class DecoderParts(NamedTuple):
    """Decoder as the C library computes its steps, in ``econmt translate`` as in the exported runtime.

    Attributes:
        sizes: sizes by their names in kernels.h.
        products: products of a step by name, in the order of kernels.h; None for missing ones.
        sources: products with the encoder's outputs (B, S, E), once for each sentence, named after their results.
        vectors: other tensors by their names in kernels.h.
    """

    sizes: dict[str, int]
    products: dict[str, Affine | None]
    sources: dict[str, Affine]
    vectors: dict[str, Tensor]

    @classmethod
    def of(cls, model: TranslationModel) -> DecoderParts:
        """Derives the parts of a decoder of one of :data:`~econmt_ops.backends.c.search.CELL_NUMBERS`."""
        decoder, attention = model.decoder, model.decoder.attention
        config, coverage = decoder.config, attention.coverage
        bottom, *upper = [split_weights(decoder.cell.cell, each) for each in weights_of(decoder.layers)]
        search = SearchWeights.of(decoder, attention.query, bottom.input)
        readout = model.readout
        products: dict[str, Affine | None] = {
            "words": (dense(search.word), bottom.read_bias),
            "own": (search.top, search.top_bias),
            "query": None if search.query is None else (search.query, None),
            "readout": None if readout is None else (readout.weight, readout.bias),
            "output": (model.output.weight, model.output.bias),
            "coverage": None,
        }
        sources: dict[str, Affine] = {"values": (search.values, None)}
        tensors = {
            "score": attention.score,
            "gain": attention.gain,
            "shift": attention.shift,
            "context_bias": search.context_bias,
        }
        if coverage is not None:
            tensors["coverage_key"] = coverage.key.weight.t()
            if coverage.read is not None:
                attended, values, state = coverage.split(coverage.read.weight)
                sources["coverage_shares"] = values, coverage.read.bias
                tensors["coverage_attention"] = attended
                products["coverage"] = None if state is None else (state, None)
            if coverage.recur is not None:
                tensors["coverage_recurrent"] = coverage.recur.weight
        if decoder.norm is not None:
            tensors |= {"output_gain": decoder.norm.weight, "output_shift": decoder.norm.bias}
        if bottom.extra:
            tensors["vectors"] = torch.cat([part for layer in (bottom, *upper) for part in layer.extra])
        below = bottom._replace(input=search.fed, read_bias=None)
        for number, layer in enumerate((below, *upper)):
            products |= _layer_products(f"layers.{number}", layer, adds=config.cell in ("lstm", "lnglstm"))
        sizes = {
            "layers": config.layers,
            "size": config.size,
            "cell": CELL_NUMBERS[config.cell],
            "fed": int(config.input_feeding),
            "residual": int(config.residual),
            "contexts": int(search.contexts),
            "asked": search.asked,
            "embedded": model.target_embedding.weight.shape[1],
            "coverage": 0 if coverage is None else COVERAGES.index(coverage.kind),
            "width": 0 if coverage is None else coverage.key.weight.shape[1],
        }
        vectors = {
            name: part.detach().float().clone(memory_format=torch.contiguous_format)
            for name, part in tensors.items()
            if part is not None
        }
        return cls(sizes, products, sources, vectors)


def _layer_products(name: str, layer: Split, *, adds: bool) -> dict[str, Affine | None]:
    """Returns the two products of a layer, whose input weight may be None; ``adds``: True if their sum is needed."""
    parts = [dense(part) for part in (layer.input, layer.hidden if adds else None) if part is not None]
    recur = None if adds or layer.hidden is None else (dense(layer.hidden), layer.recurrent_bias)
    return {f"{name}.read": (torch.cat(parts, 1), layer.read_bias) if parts else None, f"{name}.recur": recur}
