"""Sources as the steps of a search read them.

Shapes: B sentences, S source positions, A attention size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from econmt.model.inference.copying import SourceWords
from econmt.model.inference.layout import is_watched


class Sources(NamedTuple):
    """Sources of B sentences.

    Attributes:
        keys: (B, S, A), as the scores of a step want them. factors: whether they are exponentials.
        values: (B, S, .) what the attention sums. padding: (B, S), True past a sentence's length.
        lengths: (B,).
        kernels: our kernels on keys and values, where these stay at their place; or None.
        words: what may be copied, of a model that copies.
    """

    keys: Tensor
    factors: bool
    values: Tensor
    padding: Tensor
    lengths: Tensor
    kernels: Any = None
    words: SourceWords | None = None

    def keep(self, sentences: Tensor) -> Sources:
        """The sentences with indices ``sentences`` (C,), cut to the longest of them."""
        lengths = self.lengths[sentences]
        size = self.keys.shape[1] if is_watched() else int(lengths.max())
        keys, values, padding = (
            part[:, :size].index_select(0, sentences) for part in (self.keys, self.values, self.padding)
        )
        words = None if self.words is None else self.words.keep(sentences, size)
        return Sources(keys, self.factors, values, padding, lengths, words=words)
