"""Source words and their factors as one number each, so that what holds, sorts and pads ids need not know of factors.

The number is word + V (factor 1 + F1 (factor 2 + ...)), where V is the size of the source vocabulary and Fn that of the
n-th stream's. Padding is 0 that way, and the end of a sentence, which has no factors, is the id that it has without.
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
    """The numbers of words with their factors, from the ids of both, all of one shape.

    Args:
        words: ids of the source vocabulary. factors: of each stream.
        sizes: of the source vocabulary and of each stream's.
    """
    scale = 1
    for ids, size in zip(factors, sizes, strict=False):
        scale *= size
        words = words + ids * scale
    return words


def separate_ids(ids: Ids, sizes: Sequence[int]) -> list[Ids]:
    """The opposite of :func:`joined_ids`: the ids of words, and those of each stream."""
    parts: list[Ids] = []
    for size in sizes[:-1]:
        parts.append(ids % size)
        ids = ids // size
    parts.append(ids)
    return parts
