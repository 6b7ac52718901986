"""A decoder of LSTM layers as the C library's beam search reads it: all steps of a search are one call.

Shapes: B sentences, S source positions, H decoder size, A attention size, E encoder size, V target vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.model.decoder import Memory, Recurrent
from econmt.model.inference.layout import laid_out
from econmt.model.layers import weights_of
from econmt.model.translation import TranslationModel
from econmt_ops.backends import c as native
from econmt_ops.backends.c.search import SearchWeight
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.weights import LowRank

_TABLE_BYTES = 256 << 20
"""The largest table of what words add to the lowest layer's gates."""


class NativeSources(NamedTuple):
    """What a search knows of B sentences, in float32.

    Attributes:
        keys: (B, S, A). values: (B, S, H), their share of o; where layers read contexts, these behind: (B, S, H + E).
        padding: (B, S) uint8. first: (layers, 2, B, H) h and c before the first step.
    """

    keys: Tensor
    values: Tensor
    padding: Tensor
    first: Tensor


class NativeDecoder:
    """A decoder's weights, laid out once; a search that needs them as tensors takes the other decoders.

    Args:
        model: one that this :meth:`knows`. dtype: of products.

    Attributes:
        sizes: of the structure of kernels.h, by their names there.
        weights: in the order of kernels.h. tensors: what else does not depend on the sentences.
    """

    def __init__(self, model: TranslationModel, dtype: torch.dtype) -> None:
        decoder, attention = model.decoder, model.decoder.attention
        config, size = decoder.config, decoder.config.size
        embedding = model.target_embedding.weight.detach()
        contexts = not config.input_feeding and config.layers > 1
        weight, bias = decoder.combine.weight.detach(), decoder.combine.bias.detach()
        own, query = weight[:, :size], attention.query
        asked = 0 if query is None or contexts else len(query)
        if query is not None and asked:
            own, bias = torch.cat([query.detach(), own]), torch.cat([bias.new_zeros(asked), bias])
        bottom, *upper = weights_of(decoder.layers)
        read, width = bottom.input.detach(), embedding.shape[1]
        lowest = torch.cat([read[:, width:], bottom.hidden.detach()], 1)
        readout = model.readout
        made: list[tuple[Tensor, Tensor | None] | None] = [
            (read[:, :width], bottom.bias),
            (lowest, None),
            (own, bias),
            (query, None) if contexts and query is not None else None,
            None if readout is None else (readout.weight, readout.bias),
            (model.output_weight, model.output_bias),
            *((torch.cat([layer.input, layer.hidden], 1), layer.bias) for layer in upper),
        ]
        self.weights = [None if each is None else SearchWeight(each[0], each[1], dtype) for each in made]
        self._values = laid_out(weight[:, size:], None, dtype)
        self._contexts, self._scale = contexts, attention.scale
        self.sizes = {
            "layers": config.layers,
            "size": size,
            "fed": int(config.input_feeding),
            "residual": int(config.residual),
            "contexts": int(contexts),
            "asked": asked,
            "embedded": width,
        }
        score = attention.score
        self.tensors: dict[str, Tensor | None] = {
            "embedding": embedding.contiguous(),
            "score": None if score is None else score.detach().contiguous(),
        }
        if len(embedding) * 4 * size * 4 <= _TABLE_BYTES:
            # Pages of it that no word needs are never there.
            self.tensors["shares"] = torch.empty(len(embedding), 4 * size)
            self.tensors["known"] = torch.zeros(len(embedding), dtype=torch.uint8)

    @staticmethod
    def knows(model: TranslationModel) -> bool:
        """Whether the library is there and has such decoders."""
        decoder = model.decoder
        if decoder.steps or not decoder.cell.laid_out or model.copying is not None:
            return False
        if not native.serves(model.output_weight):
            return False
        if model.output_weight.dtype != torch.float32 or decoder.attention.layer_norm is not None:
            return False
        parts = [part for layer in weights_of(decoder.layers) for part in (layer.input, layer.hidden)]
        return not any(isinstance(part, LowRank) for part in parts)

    def begin(self, memory: Memory, first: Recurrent) -> NativeSources:
        """What a search knows of the sentences of a memory, and of the decoder's first state."""
        keys, values, lengths = memory
        shares = self._values(values)
        if self._contexts:
            shares = torch.cat([shares, values.to(shares.dtype)], 2)
        keys = keys.float() if math.isclose(self._scale, 1.0) else keys.float() * self._scale
        padding = padding_mask(lengths, keys.shape[1], keys.device).to(torch.uint8)
        layers = torch.stack([part.float() for parts in first.layers for part in parts])
        return NativeSources(keys.contiguous(), shares.float().contiguous(), padding, layers)
