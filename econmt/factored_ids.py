"""Joint ids: a source word and its factors as one integer, so that storing, sorting and padding need not know factors.

The joint id is word + V (factor 1 + F1 (factor 2 + ...)), where V is the size of the source vocabulary and Fn the size
of the n-th stream's vocabulary. Padding stays 0, and the end of a sentence, which has no factors, keeps its id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

Ids = TypeVar("Ids", int, "Tensor", "npt.NDArray[np.integer[Any]]")


def joined_ids(words: Ids, factors: Sequence[Ids], sizes: Sequence[int]) -> Ids:
    """Returns the joint ids of words and their factors.

    Args:
        words: word ids, of any shape. factors: factor ids of each stream, each of the shape of ``words``.
        sizes: sizes of the source vocabulary and of each stream's vocabulary.
    """
    scale = 1
    for ids, size in zip(factors, sizes, strict=False):
        scale *= size
        words = words + ids * scale
    return words


def separate_ids(ids: Ids, sizes: Sequence[int]) -> list[Ids]:
    """Splits joint ids into word ids and the factor ids of each stream; the inverse of :func:`joined_ids`."""
    parts: list[Ids] = []
    for size in sizes[:-1]:
        parts.append(ids % size)
        ids = ids // size
    parts.append(ids)
    return parts
