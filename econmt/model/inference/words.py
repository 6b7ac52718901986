"""Shares of target words in the pre-activations of the bottom layer, computed once per word.

Shapes: R rows, I embedding width, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt.model.inference.layout import TABLE_BYTES, Gates, is_watched


class WordShares:
    """Shares of words in the pre-activations of the bottom layer, including its bias.

    On a CPU the share of a word is computed when it first occurs and then looked up.

    Args:
        embedding: (V, I). gates: product with embeddings. width: width of the product, 4H for an LSTM.
    """

    def __init__(self, embedding: Tensor, gates: Gates, width: int) -> None:
        self.embedding, self.gates = embedding, gates
        self.known: Tensor | None = None
        size = len(embedding) * width * gates.dtype.itemsize
        if embedding.device.type == "cpu" and size <= TABLE_BYTES:
            # Memory pages of words that do not occur are never allocated.
            self.table = torch.empty(len(embedding), width, dtype=gates.dtype)
            self.known = torch.zeros(len(embedding), dtype=torch.bool)

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
        return self.gates(self.embedding.index_select(0, tokens).to(self.gates.dtype))
