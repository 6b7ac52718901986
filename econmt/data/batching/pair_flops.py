"""The work of a sentence pair: how many operations a model spends on it, as a function of its two lengths.

A model of :mod:`econmt.model` does so many operations for each source position, so many for each target position and
so many for each pair of positions that the attention compares. Padding is judged by it, because a padded target
position, with its row of the output layer, costs several times what a padded source position costs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.config.model import LayerShape, Model, RecurrentStack, layer_shapes


class PairFlops(NamedTuple):
    """Coefficients of the work of a pair of S source and T target positions, ``</s>`` counted."""

    source: int
    """Operations a source position."""
    target: int
    """Operations a target position."""
    pair: int
    """Operations a source and target position."""

    def of(self, source: npt.ArrayLike, target: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Work of pairs: source S + target T + pair S T; the two arrays are broadcast against each other."""
        s, t = np.asarray(source, np.int64), np.asarray(target, np.int64)
        return self.source * s + self.target * t + self.pair * s * t

    def scaled(self) -> PairFlops:
        """The same ratios in small numbers, so that sums over many millions of pairs are exact in float64."""
        unit = max(1, sum(self) >> 20)
        return PairFlops(*(-(-value // unit) for value in self))


def pair_flops(model: Model, target_vocabulary: int) -> PairFlops:
    """Operations of a model's forward pass: those of matrix products, a multiplication and an addition counting two.

    The backward pass does twice as many of each kind, so that the ratios are those of training.

    Args:
        model: the model section of a recipe.
        target_vocabulary: entries of the output layer.
    """
    encoder, decoder = model.encoder, model.decoder
    comparison = model.attention.size if model.attention.type in ("additive", "mhdot") else decoder.size
    below, above = layer_shapes(model)
    source = sum(_layer(shape, encoder) for shape in below)
    if model.attention.type in ("additive", "bilinear", "mhdot"):
        source += 2 * encoder.size * comparison  # the keys
    target = sum(_layer(shape, decoder) for shape in above)
    if model.attention.type == "additive":
        target += 2 * decoder.size * comparison  # the query
    target += 2 * (decoder.size + encoder.size) * decoder.size  # [h ; context] to the attentional vector
    tied = model.weight_tying in ("trg_softmax", "src_trg_softmax")
    if tied and decoder.size != model.embedding:
        target += 2 * decoder.size * model.embedding
    read = model.embedding if tied else decoder.size
    target += 2 * read * target_vocabulary
    pair = 2 * comparison + 2 * encoder.size
    if decoder.copy_attention:  # its gate
        source, target, pair = source + 2 * encoder.size, target + 2 * (read + model.embedding), pair + 2
    return PairFlops(source, target, pair)


def _layer(shape: LayerShape, stack: RecurrentStack) -> int:
    """Operations of a position of a recurrent layer; of factorised gates two products with thin factors."""
    from econmt_ops.cells.table import CELLS  # PyTorch with it, which not every reader of this module needs

    inputs, size, directions = shape
    rank = stack.rank
    if rank is None:
        return directions * CELLS[stack.cell].operations(inputs, size)
    return directions * 2 * rank * (inputs + 4 * size + size + 4 * size)
