"""Products with matrices that may be factorized: W = left right is applied as two thin products, without computing W.

With X (M, K), W (N, K) of rank r and the gradient dZ (M, N) of Z = X W^T:

    Z = (X right^T) left^T          2 M r (N + K) operations instead of 2 M N K
    P = dZ left                     (M, r), used by both of the following
    dX = P right
    d right = P^T X                 d left = dZ^T (X right^T)

This takes fewer operations than with W as long as r < N K / (N + K).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Union

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.core.alignment import even
from econmt_ops.core.weights import AnyLSTMWeights, LowRank, LowRankLSTMWeights, LSTMWeights, Matrix
from econmt_ops.products.gemm import MANY, Product, multiply
from econmt_ops.products.outer import add_outer


def columns(weight: Matrix, begin: int, end: int) -> Matrix:
    """Returns the columns begin to end of a matrix, as a view."""
    if isinstance(weight, LowRank):
        return LowRank(weight.left, weight.right[:, begin:end])
    return weight[:, begin:end]


def joined(first: Matrix, second: Matrix) -> Matrix:
    """Concatenates two matrices of the same kind side by side, (N, K + M).

    Of two factorized matrices the left factors are concatenated and the right factors become diagonal blocks.
    Multiplying the zeros beside the blocks takes less time than two products.
    """
    if isinstance(first, LowRank):
        assert isinstance(second, LowRank)
        (upper, width), (lower, other) = first.right.shape, second.right.shape
        right = first.right.new_zeros(upper + lower, width + other)
        right[:upper, :width], right[upper:, width:] = first.right, second.right
        return LowRank(torch.cat([first.left, second.left], 1), right)
    assert not isinstance(second, LowRank)
    return torch.cat([first, second], 1)


def cast_together(first: Matrix, second: Matrix, dtype: torch.dtype) -> tuple[Matrix, Matrix, Tensor | None]:
    """Casts two weights; if this copies whole matrices, also returns both side by side in one tensor, (4H, I + H).

    Its rows, and the last 2H values of each, begin where products are fast.
    """
    if isinstance(first, LowRank) or isinstance(second, LowRank) or first.dtype == second.dtype == dtype:
        return first.to(dtype), second.to(dtype), None
    rows, width = first.shape
    end, fed = width + second.shape[1], width - second.shape[1]
    padding = even(fed, dtype) - fed
    both = first.new_empty(rows, even(padding + end, dtype), dtype=dtype)[:, padding : padding + end]
    both[:, :width], both[:, width:] = first, second
    return both[:, :width], both[:, width:], both


def linear(inputs: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Computes inputs (..., K) times weight (N, K) transposed, plus bias (N,), under autograd."""
    if isinstance(weight, LowRank):
        return functional.linear(functional.linear(inputs, weight.right), weight.left, bias)
    return functional.linear(inputs, weight, bias)


def project(
    inputs: Tensor, weight: Matrix, bias: Tensor | None = None, out: Tensor | None = None, adds: bool = False
) -> Tensor:
    """Computes :func:`linear` without autograd, by the fastest library.

    ``out`` (..., N), contiguous, is written, or with ``adds`` added to, without a bias.
    """
    if isinstance(weight, LowRank):
        inputs, weight = project(inputs, weight.right), weight.left
    rows = None if out is None else out.view(-1, len(weight))
    product = multiply(inputs.reshape(-1, inputs.shape[-1]), weight, bias, rows, adds)
    return product.view(*inputs.shape[:-1], len(weight))


def linear_add(start: Tensor, inputs: Tensor, weight: Matrix) -> Tensor:
    """Computes start (B, N) or (N,) plus inputs (B, K) times weight (N, K) transposed, a new tensor (B, N)."""
    if isinstance(weight, LowRank):
        return torch.addmm(start, torch.mm(inputs, weight.right.t()), weight.left.t())
    return torch.addmm(start, inputs, weight.t())


_MANY_ROWS = 512
"""Number of rows from which on products with factors use prepacked weights; with fewer rows ordinary products take less
time. Measured in float32 on a Zen 4 core with a factor of 1,024 x 32: at 16 rows oneDNN takes 33 us and a BLAS 16, at
64 rows both 60; with thousands of rows oneDNN is twice as fast."""

_FEW_ROWS = 32
"""Largest number of rows for which 16-bit products on the CPU are computed in float32, because the libraries take
longer to start a 16-bit product than to compute it in float32. Measured with H 256 and ranks 8 to 128: at 16 rows and
rank 32 23 us against 50, at 64 rows 77 against 52."""


def few_rows_type(factor: Tensor, rows: int) -> torch.dtype:
    """Returns the type in which products of this number of rows with a factor are computed."""
    narrow = factor.device.type == "cpu" and factor.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if narrow and rows <= _FEW_ROWS else factor.dtype


class LowRankProduct:
    """Product left (right x) + bias as two thin products.

    Args:
        weight: Factorized (N, K).
        bias: (N,), or None.
        layout, calls: See `econmt_ops.products.gemm.Product`.
    """

    def __init__(
        self, weight: LowRank, bias: Tensor | None = None, layout: str = "packed", calls: int = MANY
    ) -> None:
        self._weight, self._bias, self._how = weight, bias, (layout, calls)
        self._transposed: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    @functools.cached_property
    def _many(self) -> tuple[Product, Product]:
        layout, calls = self._how
        return (
            Product(self._weight.right, None, layout, calls),
            Product(self._weight.left, self._bias, layout, calls),
        )

    def _reduced(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns right x and the transposed left factor, in the type for this number of rows."""
        dtype = few_rows_type(self._weight.left, len(rows))
        if dtype not in self._transposed:
            left, right = self._weight.to(dtype)
            self._transposed[dtype] = right.t().contiguous(), left.t().contiguous()
        right, left = self._transposed[dtype]
        return torch.mm(rows.to(dtype), right), left

    def __call__(self, inputs: Tensor, thin: Tensor | None = None) -> Tensor:
        """Returns the product of inputs (..., K), a new tensor (..., N); ``thin`` (..., r) receives right x."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        if len(rows) >= _MANY_ROWS:
            first, second = self._many
            reduced = first(rows)
            product = second(reduced)
        else:
            reduced, left = self._reduced(rows)
            bias = self._bias
            product = (
                torch.mm(reduced, left) if bias is None else torch.addmm(bias.to(left.dtype), reduced, left)
            )
        if thin is not None:
            thin.view(reduced.shape).copy_(reduced)
        return product.to(inputs.dtype).view(*inputs.shape[:-1], product.shape[1])

    def share(self, start: Tensor, inputs: Tensor) -> None:
        """Adds the product of inputs (M, K) to ``start`` (M, N) in place. Needs a bias of None."""
        assert self._bias is None
        self.into(start, inputs, start)

    def into(self, out: Tensor, inputs: Tensor, start: Tensor | None = None) -> None:
        """Writes the product of inputs (M, K) to ``out`` (M, N); see `econmt_ops.products.gemm.Product.into`."""
        start = self._bias if start is None else start
        reduced, left = self._reduced(inputs)
        if left.dtype != out.dtype:
            product = torch.mm(reduced, left)
            out.copy_(product if start is None else product + start)
        elif start is None:
            torch.mm(reduced, left, out=out)
        else:
            torch.addmm(start, reduced, left, out=out)


AnyProduct = Union[Product, LowRankProduct]
"""Product with a weight, whole or factorized."""


def product_of(
    weight: Matrix, bias: Tensor | None = None, layout: str = "packed", calls: int = MANY
) -> AnyProduct:
    """Returns the product with a weight that is prepacked once; see `econmt_ops.products.gemm.Product`."""
    if isinstance(weight, LowRank):
        return LowRankProduct(weight, bias, layout, calls)
    return Product(weight, bias, layout, calls)


def gradient_of(weight: Matrix, dtype: torch.dtype) -> Matrix:
    """Allocates a contiguous gradient to accumulate into: zeros for factors, uninitialized for a whole matrix."""
    contiguous = torch.contiguous_format
    if isinstance(weight, LowRank):
        return LowRank(*(torch.zeros_like(part, dtype=dtype, memory_format=contiguous) for part in weight))
    return torch.empty_like(weight, dtype=dtype, memory_format=contiguous)


def thin_of(weight: Matrix, doutputs: Tensor) -> Tensor | None:
    """Returns the outputs' gradient (K, B, N) times the left factor, (K, B, r); None for a whole matrix."""
    return project(doutputs, weight.left.t()) if isinstance(weight, LowRank) else None


def input_gradient(weight: Matrix, doutputs: Tensor, thin: Tensor | None) -> Tensor:
    """Returns the gradient of a product's inputs, (K, B, M), given the result of :func:`thin_of`."""
    if isinstance(weight, LowRank):
        assert thin is not None
        return project(thin, weight.right.t())
    return project(doutputs, weight.t())


def add_gradient(
    total: Matrix,
    weight: Matrix,
    doutputs: Tensor,
    inputs: Tensor,
    thin: Tensor | None = None,
    fresh: bool = False,
) -> None:
    """Adds the gradient of a weight (N, M) to ``total``, of the kind of the weight and in the type of the sum.

    Args:
        doutputs: Gradient of inputs weight^T, (K, B, N). inputs: (K, B, M).
        thin: Product of ``doutputs`` with the left factor, (K, B, r), if it is known already.
        fresh: True if ``total`` is a whole matrix without values yet.
    """
    if isinstance(total, LowRank):
        assert isinstance(weight, LowRank)
        add_outer(total.left, doutputs, Product(weight.right, calls=1)(inputs))
        thin = Product(weight.left.t(), calls=1)(doutputs) if thin is None else thin
        add_outer(total.right, thin, inputs)
    else:
        add_outer(total, doutputs, inputs, fresh)


def tensors_of_matrices(weights: Sequence[Matrix]) -> list[Tensor]:
    """Flattens matrices to tensors for an operator: each matrix, or its factors, left before right."""
    return [part for weight in weights for part in (weight if isinstance(weight, LowRank) else (weight,))]


def tensors_of_layers(layers: Sequence[AnyLSTMWeights]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Flattens layers to an operator's three lists of input weights, recurrent weights and biases."""
    inputs, hiddens = (tensors_of_matrices([layer[part] for layer in layers]) for part in range(2))
    return inputs, hiddens, [layer.bias for layer in layers]


def matrices_of_tensors(tensors: Sequence[Tensor], count: int) -> list[Matrix]:
    """Restores ``count`` matrices from an operator's tensors; the inverse of :func:`tensors_of_matrices`."""
    if len(tensors) == count:
        return list(tensors)
    assert len(tensors) == 2 * count
    return [LowRank(left, right) for left, right in zip(tensors[::2], tensors[1::2], strict=True)]


def layers_of_tensors(
    inputs: Sequence[Tensor], hiddens: Sequence[Tensor], biases: Sequence[Tensor]
) -> list[AnyLSTMWeights]:
    """Restores layers from an operator's three lists of weights."""
    kind: Any = LSTMWeights if len(inputs) == len(biases) else LowRankLSTMWeights
    matrices = [matrices_of_tensors(part, len(biases)) for part in (inputs, hiddens)]
    return [kind(*parts) for parts in zip(*matrices, biases, strict=True)]
