"""Prepacked weights for the many products of few rows in a search, and tables of the products with embeddings.

Shapes: R rows, I embedding width, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.core.int8 import rounded
from econmt_ops.core.weights import LowRank, Matrix
from econmt_ops.products.gemm import Product
from econmt_ops.products.int8 import Int8Product

TABLE_BYTES = 256 << 20
"""Maximum size in bytes of a table of the words' shares in the gates of the bottom layer."""


def value_type(products: torch.dtype) -> torch.dtype:
    """Returns the type of inputs and outputs of products of type ``products``: float32 for int8."""
    return torch.float32 if products == torch.int8 else products


def prepacked(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Product | Int8Product:
    """Creates the product with a weight (N, K), packed on a CPU for products of few rows.

    ``dtype`` is the type of the product; with int8 both factors are rounded to 8 bits.
    """
    if dtype == torch.int8:
        return Int8Product(weight, bias)
    layout = "packed" if weight.device.type == "cpu" else "row"
    return Product(weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype), layout)


def dense(weight: Matrix) -> Tensor:
    """Returns a weight (N, K); if it is factorized, the product of its factors."""
    return weight.left @ weight.right if isinstance(weight, LowRank) else weight


class EmbeddingRows:
    """Rows of an embedding table, rounded to 8 bits if products are.

    Args:
        weight: (V, I). dtype: type of the products.

    Attributes:
        values: (V, I), int8 or the type of ``weight``.
        steps: scales (V,) of the rows of int8 values, else None.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.values = weight.detach()
        self.steps: Tensor | None = None
        if dtype == torch.int8:
            self.values, self.steps = rounded(weight)

    def __call__(self, ids: Tensor) -> Tensor:
        """Returns the embeddings (R, I) of ids (R,)."""
        rows = self.values.index_select(0, ids)
        return rows if self.steps is None else rows.float() * self.steps.index_select(0, ids).unsqueeze(1)


class Gates:
    """Sum of the products of several inputs: the pre-activations of one layer's gates.

    Args:
        weights: weight of each input, (4H, .). bias: (4H,) or None. dtype: type of the products.

    Attributes:
        dtype: type of inputs and outputs.
    """

    def __init__(self, weights: Sequence[Matrix], bias: Tensor | None, dtype: torch.dtype) -> None:
        self.dtype = value_type(dtype)
        if dtype == torch.int8:  # every product of factors would be rounded once more
            weights = [dense(part) for part in weights]
        # Each input is multiplied by its right factor, and the results by all left factors in one product.
        self._right = [prepacked(part.right, None, dtype) for part in weights if isinstance(part, LowRank)]
        matrices = [part.left if isinstance(part, LowRank) else part for part in weights]
        self._product = prepacked(torch.cat(matrices, 1), bias, dtype)

    def __call__(self, *inputs: Tensor, start: Tensor | None = None) -> Tensor:
        """Computes pre-activations (R, 4H), a new tensor, from the inputs (R, .) of each weight.

        ``start`` (R, 4H) is added and may be overwritten; it excludes a bias.
        """
        if self._right:
            inputs = tuple(right(part) for right, part in zip(self._right, inputs, strict=True))
        joined = inputs[0] if len(inputs) == 1 else torch.cat(inputs, 1)
        return self._product(joined) if start is None else self._product.plus(start, joined)


class WordShares:
    """Shares of words in the pre-activations of the bottom layer, including its bias.

    On a CPU the share of a word is computed when it first occurs and then looked up.

    Args:
        embedding: rows (., I) of V words. gates: product with embeddings. width: width of the product, 4H for an LSTM.
    """

    def __init__(self, embedding: EmbeddingRows, gates: Gates, width: int) -> None:
        self.embedding, self.gates = embedding, gates
        self.known: Tensor | None = None
        words = len(embedding.values)
        if embedding.values.device.type == "cpu" and words * width * gates.dtype.itemsize <= TABLE_BYTES:
            # Memory pages of words that do not occur are never allocated.
            self.table = torch.empty(words, width, dtype=gates.dtype)
            self.known = torch.zeros(words, dtype=torch.bool)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns the shares (R, width) of tokens (R,), a new tensor."""
        if self.known is None or is_watched():
            return self._make(tokens)
        unknown: Tensor = torch.unique(tokens[~self.known[tokens]])
        if len(unknown):
            self.table[unknown] = self._make(unknown)
            self.known[unknown] = True
        return self.table.index_select(0, tokens)

    def _make(self, tokens: Tensor) -> Tensor:
        return self.gates(self.embedding(tokens).to(self.gates.dtype))


def is_watched() -> bool:
    """Returns True if a dispatch mode is active; fake tensors, for example, have no values to inspect."""
    return bool(torch._C._len_torch_dispatch_stack())
