"""Work of a sentence pair: number of operations of a model as a function of the two lengths.

A model needs a fixed number of operations per source position, per target position and per pair of positions that the
attention compares. The cost of padding is measured in this work, because a target position, with its output layer,
costs several times as much as a source position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.config.model import LayerShape, Model, layer_shapes
from econmt.config.stacks import RecurrentStack


class PairFlops(NamedTuple):
    """Coefficients of the work of a pair of S source and T target positions, including ``</s>``."""

    source: int
    """Operations per source position."""
    target: int
    """Operations per target position."""
    pair: int
    """Operations per pair of a source and a target position."""

    def of(self, source: npt.ArrayLike, target: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Returns the work source S + target T + pair S T; the arrays are broadcast against each other."""
        s, t = np.asarray(source, np.int64), np.asarray(target, np.int64)
        return self.source * s + self.target * t + self.pair * s * t

    def scaled(self) -> PairFlops:
        """Returns the coefficients scaled down, so that sums over many millions of pairs are exact in float64."""
        return PairFlops(*(-(-value // self.unit) for value in self))

    @property
    def unit(self) -> int:
        """Operations that are one in :meth:`scaled`."""
        return max(1, sum(self) >> 20)


def pair_flops(model: Model, target_vocabulary: int) -> PairFlops:
    """Returns the operations of matrix products in a model's forward pass; a multiply-add counts as two.

    The backward pass needs twice as many of each kind, so that the ratios also hold for training.
    """
    encoder, decoder = model.encoder, model.decoder
    comparison = model.attention.size if model.attention.type == "additive" else decoder.size
    embedding = model.embedding
    encoder_layers, decoder_layers = layer_shapes(model)
    source = sum(_layer(shape, encoder) for shape in encoder_layers)
    if model.attention.type in ("additive", "bilinear"):
        source += 2 * encoder.size * comparison  # the keys
    target = sum(_layer(shape, decoder) for shape in decoder_layers)
    if model.attention.type == "additive":
        target += 2 * decoder.size * comparison  # the query
    target += 2 * (decoder.size + encoder.size) * decoder.size  # [h ; context] to the attentional vector
    tied = model.weight_tying in ("trg_softmax", "src_trg_softmax")
    if tied and decoder.size != embedding:
        target += 2 * decoder.size * embedding
    target += 2 * (embedding if tied else decoder.size) * target_vocabulary
    pair = 2 * comparison + 2 * encoder.size
    return PairFlops(source, target, pair)


def _layer(shape: LayerShape, stack: RecurrentStack) -> int:
    """Returns the operations per position of a recurrent layer, with factorised matrices if it has a rank."""
    from econmt_ops.cells.table import KINDS  # needs PyTorch, which other users of this module do not

    inputs, size, directions = shape
    rank = stack.rank
    if rank is None:
        return directions * KINDS[stack.cell].operations(inputs, size)
    return directions * 2 * rank * (inputs + 4 * size + size + 4 * size)
