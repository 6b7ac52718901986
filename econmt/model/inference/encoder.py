"""Encoder with prepacked weights for searches on a CPU.

The share of a word in the pre-activations of the bottom layer is computed once for each distinct word of a batch.
Both directions of a layer advance together.

Shapes: B sentences, S source positions, H units and G gates of a direction, I input size, E encoder size,
N distinct words.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.model.decoder import Memory
from econmt.model.encoder import Encoder
from econmt.model.inference.layout import EmbeddingRows, Gates, dense, prepacked, value_type
from econmt.model.layers import mean_of_valid, weights_of
from econmt.model.translation import EncoderOutput, TranslationModel
from econmt_ops.backends import c as native
from econmt_ops.backends.c.search import CELL_NUMBERS, SearchWeight, layer_sequence
from econmt_ops.backends.eager import advance_cell
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.weights import LowRank, Matrix
from econmt_ops.lstm.reference import closed_gates


def prepacks(model: TranslationModel, dtype: torch.dtype) -> bool:
    """Returns True if :class:`PrepackedEncoder` encodes for searches of a model on this device.

    In 8 bits it has all cells of the exported runtime, whose arithmetic is the same.
    """
    encoder, output = model.encoder, model.output.weight
    if output.device.type != "cpu":
        return False
    if encoder.cell.prepacked:
        return True
    # Then the last output includes the layer below.
    sums_last = encoder.config.residual and not encoder.forward_layers
    return (
        dtype == torch.int8
        and encoder.config.cell in CELL_NUMBERS
        and native.serves(output)
        and not sums_last
    )


class _Share(NamedTuple):
    """Shares of the inputs in a direction's pre-activations; at padded positions they close the gates.

    Attributes:
        table: distinct shares, (M, G H). rows: row of the table for each position, (S, B).
    """

    table: Tensor
    rows: Tensor


class _Direction:
    """One direction of a layer.

    Attributes:
        number: number of the cell for the C library; None if it does not run the layer.
        recurrent: weight of the product with h for the C library; None for SSRU.
    """

    def __init__(self, cell: str, weights: Any, dtype: torch.dtype, reverse: bool) -> None:
        self.read = Gates([weights.input], weights.bias, dtype)
        self.reverse, self._dtype = reverse, dtype
        self._hidden: Matrix | None = getattr(weights, "hidden", None)
        self.size = len(weights.bias) // 2 if self._hidden is None else self._hidden.shape[1]
        # Pre-activations of padded positions: c stays unchanged, and h is 0. The C library does not read them.
        closed = closed_gates(weights) if cell == "lstm" else torch.zeros_like(weights.bias)
        self.closed = closed.detach().to(value_type(dtype))
        self.number: int | None = None
        self.recurrent: SearchWeight | None = None
        factored = isinstance(self._hidden, LowRank) and dtype != torch.int8
        if SearchWeight.supports(dtype) and not factored and native.serves(weights.bias):
            self.number = CELL_NUMBERS[cell]
            if self._hidden is not None:
                bias = getattr(weights, "hidden_bias", None)
                self.recurrent = SearchWeight(dense(self._hidden), bias, dtype)

    @functools.cached_property
    def recur(self) -> Gates:
        """Product with the previous h of an LSTM."""
        assert self._hidden is not None
        return Gates([self._hidden], None, self._dtype)

    def share_of_words(self, embedded: Tensor, rows: Tensor) -> _Share:
        """Computes shares from embeddings (N, I) of distinct words; ``rows`` (S, B) is N at padded positions."""
        return _Share(torch.cat([self.read(embedded), self.closed.unsqueeze(0)]), rows)

    def share(self, below: Tensor, padding: Tensor) -> _Share:
        """Computes shares from the outputs (S, B, E) of the layer below; ``padding`` is a mask (S, B)."""
        table = torch.where(padding.unsqueeze(2), self.closed, self.read(below)).flatten(0, 1)
        return _Share(table, torch.arange(len(table)).view(padding.shape))


class PrepackedEncoder:
    """Encoder for searches on a CPU: :meth:`TranslationModel.encode` up to rounding, without gradients and dropout.

    Weights are copied; later changes of the model have no effect. Products and, except for int8, outputs have the type
    ``dtype``; c and sums have at least float32.
    """

    def __init__(self, model: TranslationModel, dtype: torch.dtype) -> None:
        self.dtype = value_type(dtype)
        rounds = dtype == torch.int8 and not model.source_factor_embeddings
        self._embed = EmbeddingRows(model.source_embedding.weight, dtype) if rounds else model.embed_source
        self._layers = _layers(model.encoder, dtype)
        self._is_lstm = model.encoder.config.cell == "lstm"
        self._residual = model.encoder.config.residual
        self._averages = model.config.decoder.state_init == "avg"
        key = model.decoder.attention.key
        self._key = None if key is None else prepacked(key.weight, key.bias, dtype)

    @property
    def can_run(self) -> bool:
        """False while cells that only the C library runs cannot run, because it is disabled."""
        return self._is_lstm or native.serves(torch.empty(0))

    def __call__(self, source: Tensor, lengths: Tensor) -> EncoderOutput:
        """Encodes ``source`` (B, S) int64, padded; ``lengths`` (B,), each at least 1."""
        words, rows = torch.unique(source.t(), return_inverse=True)
        padding = padding_mask(lengths, source.shape[1], source.device).t()
        rows = rows.masked_fill(padding, len(words))
        embedded = self._embed(words).to(self.dtype)
        bottom, *upper = self._layers
        shares = [direction.share_of_words(embedded, rows) for direction in bottom]
        outputs, last = self._run(bottom, shares, lengths)
        for layer in upper:
            below = outputs
            outputs, last = self._run(
                layer, [direction.share(below, padding) for direction in layer], lengths
            )
            if self._residual:
                outputs = outputs + below
        values = outputs.transpose(0, 1).contiguous()
        keys = values if self._key is None else self._key(values)
        if self._averages:
            last = mean_of_valid(values.double(), lengths).to(values.dtype)  # in whichever order it is summed
        return EncoderOutput(Memory(keys, values, lengths), last)

    def _run(self, layer: list[_Direction], shares: list[_Share], lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the outputs (S, B, E) of a layer, zero at padded positions, and its last hidden state (B, E)."""
        if all(direction.number is not None for direction in layer) and native.serves(torch.empty(0)):
            return self._run_natively(layer, shares, lengths)
        steps = len(shares[0].rows)
        batch, size = len(lengths), layer[0].size
        hidden = torch.empty(steps, len(layer), batch, size, dtype=self.dtype)
        c = torch.zeros(len(layer) * batch, size, dtype=accumulate_dtype(self.dtype))
        orders = [
            share.rows.flip(0) if direction.reverse else share.rows
            for direction, share in zip(layer, shares, strict=True)
        ]
        for step, h in enumerate(hidden):
            gates = [
                share.table.index_select(0, order[step]) for share, order in zip(shares, orders, strict=True)
            ]
            if step > 0:
                before = hidden[step - 1]
                gates = [
                    direction.recur(before[number], start=gates[number])
                    for number, direction in enumerate(layer)
                ]
            total = gates[0] if len(gates) == 1 else torch.cat(gates)
            advance_cell(total.to(c.dtype), c, h.flatten(0, 1), c)
        parts = [
            hidden[:, number].flip(0) if direction.reverse else hidden[:, number]
            for number, direction in enumerate(layer)
        ]
        ends = (lengths - 1).view(1, batch, 1).expand(1, batch, size)
        last = [
            part[0] if direction.reverse else part.gather(0, ends)[0]
            for part, direction in zip(parts, layer, strict=True)
        ]
        return torch.cat(parts, 2), torch.cat(last, 1)

    def _run_natively(
        self, layer: list[_Direction], shares: list[_Share], lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes :meth:`_run` in the C library, one direction per call."""
        size, width = layer[0].size, len(layer) * layer[0].size
        outputs = torch.zeros(*shares[0].rows.shape, width)
        last = torch.empty(len(lengths), width)
        for number, (direction, share) in enumerate(zip(layer, shares, strict=True)):
            columns = slice(number * size, (number + 1) * size)
            assert direction.number is not None
            layer_sequence(
                direction.number,
                direction.recurrent,
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
    cell, reverse = encoder.config.cell, encoder.config.reverse_input
    both = [
        [_Direction(cell, ahead, dtype, False), _Direction(cell, back, dtype, True)] for ahead, back in pairs
    ]
    alone = [[_Direction(cell, weights, dtype, reverse)] for weights in weights_of(encoder.upper_layers)]
    return [*both, *alone]
