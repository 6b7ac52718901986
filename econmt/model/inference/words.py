"""Weights of single words: shortlists of the output layer, and words' shares of the bottom layer's gates.

Shapes: B sentences, R rows, H hidden size, V vocabulary, N of its words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt.model.inference.layout import TABLE_BYTES, Gates, is_watched


class OutputWords:
    """The words' share in the products of the bottom layer, with its bias.

    On the CPU a word's is computed when the word first comes and then looked up: of a vocabulary few words come often.

    Args:
        embedding: (V, I). gates: of a layer that reads embeddings. width: of their products, 4H for an LSTM.
    """

    def __init__(self, embedding: Tensor, gates: Gates, width: int) -> None:
        self.embedding, self.gates = embedding, gates
        self.known: Tensor | None = None
        size = len(embedding) * width * gates.dtype.itemsize
        if embedding.device.type == "cpu" and size <= TABLE_BYTES:
            # Pages of it that no word needs are never there.
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
