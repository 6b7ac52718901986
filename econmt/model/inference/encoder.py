"""Encoder with prepacked weights for searches on a CPU, whose recurrences the C library runs.

The share of a word in the pre-activations of the bottom layer is computed once for each distinct word of a batch.

Shapes: B sentences, S source positions, H units and G gates of a direction, I input size, E encoder size,
N distinct words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.model.decoder import Memory
from econmt.model.encoder import Encoder
from econmt.model.inference.layout import EmbeddingRows, Gates, dense, prepacked, value_type
from econmt.model.inference.weights import split_weights
from econmt.model.layers import mean_of_valid, weights_of
from econmt.model.translation import EncoderOutput, TranslationModel
from econmt_ops.backends import c as native
from econmt_ops.backends.c.search import CELL_NUMBERS, SearchWeight, layer_sequence
from econmt_ops.core.weights import LowRank


def prepacks(model: TranslationModel, dtype: torch.dtype) -> bool:
    """Returns True if :class:`PrepackedEncoder` encodes for searches of a model on this device.

    Searches in 8 bits multiply factors of matrices together, as the exported runtime does.
    """
    encoder, output = model.encoder, model.output.weight
    if not (native.serves(output) and SearchWeight.supports(dtype) and encoder.config.cell in CELL_NUMBERS):
        return False
    weights = [*weights_of(encoder.forward_layers), *weights_of(encoder.upper_layers)]
    if dtype != torch.int8 and any(isinstance(each.input, LowRank) for each in weights):
        return False
    # Then the last output includes the layer below, except of an LSTM.
    sums_last = encoder.config.residual and not encoder.forward_layers
    return encoder.config.cell == "lstm" or not sums_last


class _Share(NamedTuple):
    """Shares of the inputs in a direction's pre-activations; those of padded positions are not read.

    Attributes:
        table: distinct shares, (M, G H). rows: row of the table for each position, (S, B).
    """

    table: Tensor
    rows: Tensor


class _Direction:
    """One direction of a layer.

    Attributes:
        number: number of the cell for the C library.
        recurrent: weight of the product with h; None for SSRU.
        vectors: those of the cell, as in kernels.h, or None.
    """

    def __init__(self, encoder: Encoder, weights: Any, dtype: torch.dtype, reverse: bool) -> None:
        parts = split_weights(encoder.cell.cell, weights)
        self.read = Gates([parts.input], parts.read_bias, dtype)
        self.reverse, self.number = reverse, CELL_NUMBERS[encoder.config.cell]
        self.size = len(weights.bias) // 2 if parts.hidden is None else parts.hidden.shape[1]
        self.recurrent: SearchWeight | None = None
        if parts.hidden is not None:
            self.recurrent = SearchWeight(dense(parts.hidden), parts.recurrent_bias, dtype)
        self.vectors = torch.cat(parts.extra).detach() if parts.extra else None

    def share(self, below: Tensor) -> _Share:
        """Computes shares from the outputs (S, B, E) of the layer below."""
        table = self.read(below).flatten(0, 1)
        return _Share(table, torch.arange(len(table)).view(below.shape[:2]))


class PrepackedEncoder:
    """Encoder for searches on a CPU: :meth:`TranslationModel.encode` up to rounding, without gradients and dropout.

    Weights are copied; later changes of the model have no effect. Products and, except for int8, outputs have the type
    ``dtype``; c and sums have float32.
    """

    def __init__(self, model: TranslationModel, dtype: torch.dtype) -> None:
        self.dtype = value_type(dtype)
        rounds = dtype == torch.int8 and not model.source_factor_embeddings
        self._embed = EmbeddingRows(model.source_embedding.weight, dtype) if rounds else model.embed_source
        self._layers = _layers(model.encoder, dtype)
        self._residual = model.encoder.config.residual
        self._averages = model.config.decoder.state_init == "avg"
        key = model.decoder.attention.key
        self._key = None if key is None else prepacked(key.weight, key.bias, dtype)

    def __call__(self, source: Tensor, lengths: Tensor) -> EncoderOutput:
        """Encodes ``source`` (B, S) int64, padded; ``lengths`` (B,), each at least 1."""
        words, rows = torch.unique(source.t(), return_inverse=True)
        embedded = self._embed(words).to(self.dtype)
        bottom, *upper = self._layers
        shares = [_Share(direction.read(embedded), rows) for direction in bottom]
        outputs, last = self._run(bottom, shares, lengths)
        for layer in upper:
            below = outputs
            outputs, last = self._run(layer, [direction.share(below) for direction in layer], lengths)
            if self._residual:
                outputs = outputs + below
        values = outputs.transpose(0, 1).contiguous()
        keys = values if self._key is None else self._key(values)
        if self._averages:
            last = mean_of_valid(values.double(), lengths).to(values.dtype)  # in whichever order it is summed
        return EncoderOutput(Memory(keys, values, lengths), last)

    def _run(self, layer: list[_Direction], shares: list[_Share], lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the outputs (S, B, E) of a layer, zero at padded positions, and its last hidden state (B, E)."""
        size, width = layer[0].size, len(layer) * layer[0].size
        outputs = torch.zeros(*shares[0].rows.shape, width)
        last = torch.empty(len(lengths), width)
        for number, (direction, share) in enumerate(zip(layer, shares, strict=True)):
            columns = slice(number * size, (number + 1) * size)
            layer_sequence(
                direction.number,
                direction.recurrent,
                direction.vectors,
                share.table.float(),
                share.rows,
                lengths,
                outputs[:, :, columns],
                last[:, columns],
                backwards=direction.reverse,
            )
        return outputs.to(self.dtype), last.to(self.dtype)


def _layers(encoder: Encoder, dtype: torch.dtype) -> list[list[_Direction]]:
    """Returns the directions of each layer, bottom first."""
    pairs = zip(weights_of(encoder.forward_layers), weights_of(encoder.backward_layers), strict=True)
    both = [
        [_Direction(encoder, ahead, dtype, False), _Direction(encoder, back, dtype, True)]
        for ahead, back in pairs
    ]
    reverse = encoder.config.reverse_input
    alone = [[_Direction(encoder, weights, dtype, reverse)] for weights in weights_of(encoder.upper_layers)]
    return [*both, *alone]
