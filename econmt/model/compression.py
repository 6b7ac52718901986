"""A trained model with smaller LSTMs: each of their matrices becomes the product of two thin factors.

The best approximation of a matrix W (N, K) by one of rank r, in the sum of squared differences, is its singular value
decomposition U S V^T cut off after the r largest singular values (Eckart and Young 1936). As two factors it is

    left = U_r S_r^(1/2)    (N, r)        right = S_r^(1/2) V_r^T    (r, K)

which are balanced: left^T left = right right^T = S_r, so that a gradient step moves both alike when the model is
trained further. LSTMs were compressed so by Prabhavalkar et al. 2016, "On the compression of recurrent neural networks
with an application to LVCSR acoustic modeling for embedded speech recognition".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.config.model import Model, largest_rank

PARTS = ("encoder", "decoder")


class Compressed(NamedTuple):
    """Compression of one matrix.

    Attributes:
        name: of the parameter. rows, columns: of the matrix. rank: of its factors.
        kept: share of the sum of squared values that the product of the factors has of the matrix's.
    """

    name: str
    rows: int
    columns: int
    rank: int
    kept: float

    @property
    def before(self) -> int:
        """Values of the matrix."""
        return self.rows * self.columns

    @property
    def after(self) -> int:
        """Values of the factors."""
        return self.rank * (self.rows + self.columns)


def lstm_matrices(tensors: Mapping[str, Tensor], part: str) -> list[str]:
    """The names of the whole matrices of the encoder's or the decoder's LSTM layers."""
    ends = (".input", ".hidden")
    layers = {"encoder": ("encoder.",), "decoder": ("decoder.layers.",)}[part]
    return [name for name in tensors if name.startswith(layers) and name.endswith(ends)]


def spectrum(matrix: Tensor) -> Tensor:
    """The squared singular values of a matrix, largest first, in float64."""
    values: Tensor = torch.linalg.svdvals(matrix.double())
    return values.square()


def rank_for(matrices: Iterator[Tensor], energy: float) -> int:
    """The smallest rank at which every matrix keeps at least ``energy`` of its squared values, 0 < energy <= 1."""
    needed = 1
    for matrix in matrices:
        squares = spectrum(matrix)
        # Whole up to what float64 sums can tell.
        short = squares.cumsum(0) < energy * squares.sum() * (1.0 - 1e-12)
        needed = max(needed, int(short.sum()) + 1)
    return needed


def factorise(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """The balanced factors of the best approximation of a rank, in the matrix's type, and the share that it keeps.

    Args:
        matrix: (N, K).
        rank: r, at most N and K.

    Returns:
        left (N, r), right (r, K), and the share of the sum of squares.
    """
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    squares = values.square()
    total = float(squares.sum())
    root = values[:rank].sqrt()
    factors = (left[:, :rank] * root).to(matrix.dtype), (root[:, None] * right[:rank]).to(matrix.dtype)
    return (*factors, float(squares[:rank].sum()) / total if total > 0.0 else 1.0)


def compress_tensors(
    tensors: Mapping[str, Tensor], ranks: Mapping[str, int]
) -> tuple[dict[str, Tensor], list[Compressed]]:
    """The parameters of a model with factorised LSTMs.

    Args:
        tensors: the parameters by name.
        ranks: of the parts of the model, "encoder", "decoder", that are to be factorised.

    Returns:
        The parameters of the smaller model by name, and what became of each matrix.
    """
    ranked = {name: rank for part, rank in ranks.items() for name in lstm_matrices(tensors, part)}
    made: dict[str, Tensor] = {}
    report = []
    for name, tensor in tensors.items():
        if name not in ranked:
            made[name] = tensor
            continue
        rank = ranked[name]
        rows, columns = tensor.shape
        assert rank <= largest_rank(rows, columns)
        made[f"{name}.left"], made[f"{name}.right"], kept = factorise(tensor, rank)
        report.append(Compressed(name, rows, columns, rank, kept))
    return made, report


def with_ranks(model: Model, ranks: Mapping[str, int]) -> Model:
    """The model section with these ranks of its parts."""
    values = model.model_dump(mode="json")
    for part, rank in ranks.items():
        values[part]["rank"] = rank
    # How matrices begin means nothing to those that are learnt, and products of two cannot begin orthogonal.
    values["initialization"]["rnn_h2h"] = "default"
    return Model.model_validate(values)
