"""Compression of a trained model: each LSTM matrix is replaced by the product of two low-rank factors.

The best approximation of a matrix W (N, K) by one of rank r, in the sum of squared differences, is its singular value
decomposition U S V^T cut off after the r largest singular values (Eckart and Young 1936). As two factors it is

    left = U_r S_r^(1/2)    (N, r)        right = S_r^(1/2) V_r^T    (r, K)

They are balanced, left^T left = right right^T = S_r, so that further training moves both alike (Prabhavalkar et al.,
2016, "On the compression of recurrent neural networks with an application to LVCSR acoustic modeling").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.config.model import Model, largest_rank

PARTS = ("encoder", "decoder")


class Compressed(NamedTuple):
    """Compression of a matrix, the parameter ``name``, to factors of a rank.

    ``kept`` is the sum of squares of the factors' product, relative to that of the matrix.
    """

    name: str
    rows: int
    columns: int
    rank: int
    kept: float

    @property
    def before(self) -> int:
        """Number of values of the matrix."""
        return self.rows * self.columns

    @property
    def after(self) -> int:
        """Number of values of the factors."""
        return self.rank * (self.rows + self.columns)


def lstm_matrices(tensors: Mapping[str, Tensor], part: str) -> list[str]:
    """Returns the names of the full matrices of the LSTM layers of a part, "encoder" or "decoder"."""
    ends = (".input", ".hidden")
    layers = {"encoder": ("encoder.",), "decoder": ("decoder.layers.",)}[part]
    return [name for name in tensors if name.startswith(layers) and name.endswith(ends)]


def rank_for(matrices: Iterator[Tensor], energy: float) -> int:
    """Returns the smallest rank at which each matrix keeps the share ``energy``, in (0, 1], of its sum of squares."""
    needed = 1
    for matrix in matrices:
        squares: Tensor = torch.linalg.svdvals(matrix.double()).square()
        # The tolerance covers the rounding of float64 sums.
        short = squares.cumsum(0) < energy * squares.sum() * (1.0 - 1e-12)
        needed = max(needed, int(short.sum()) + 1)
    return needed


def factorise(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Computes the balanced factors of the best approximation of rank r of a matrix (N, K).

    Returns:
        left (N, r) and right (r, K) in the type of the matrix, and the share of the sum of squares that they keep.
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
    """Factorises the LSTM matrices of the parts "encoder" and "decoder" that ``ranks`` has a rank for.

    Returns:
        Parameters of the smaller model by name, and a report of each matrix.
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
    """Returns the model section with these ranks of its parts."""
    values = model.model_dump(mode="json")
    for part, rank in ranks.items():
        values[part]["rank"] = rank
    # Factors cannot be initialised orthogonally, and the parameters here are trained already.
    values["initialization"]["rnn_h2h"] = "default"
    return Model.model_validate(values)
