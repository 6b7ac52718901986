"""Mixing of corpora by weight, in stages: selection of the pairs of each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from econmt.config.recipe import Mixing
from econmt.errors import InputError

_DRAWS = 0x6D6978
"""Last element of the seeds used here, which makes them differ from other seeds."""


class Mixture:
    """Selection of the pairs of each epoch, which depends on seed and epoch only.

    Each corpus is an endless stream: all its pairs in random order, then again in another order. An epoch continues
    each stream where the previous epoch stopped, so that no pair is repeated before all others of its corpus were used.

    Args:
        mixing: weights and epochs of the stages. seed: seed of the orders.
        firsts: index of the first pair of each corpus in the store. pairs: number of pairs in the store.
        names: names of the corpora, for the error if one with a weight above 0 is empty.
    """

    def __init__(
        self, mixing: Mixing, firsts: Sequence[int], pairs: int, seed: int, names: Sequence[str]
    ) -> None:
        assert mixing.weights
        assert len(firsts) == len(mixing.weights[0])
        self._spans = list(pairwise([*firsts, pairs]))
        self._seed = seed
        total = mixing.epoch_pairs or pairs
        self._counts = [_shares(stage, total) for stage in mixing.weights]
        self._epochs = mixing.epochs
        for corpus, (first, end) in enumerate(self._spans):
            if first == end and any(counts[corpus] for counts in self._counts):
                raise InputError(
                    f"data.mixing.weights: {names[corpus]} has no training pairs left; set its weight to 0"
                )

    def counts(self, epoch: int) -> list[int]:
        """Returns the number of pairs of each corpus in an epoch."""
        for stage, epochs in zip(self._counts, self._epochs, strict=False):
            if epoch < epochs:
                return stage
            epoch -= epochs
        return self._counts[-1]

    def _taken(self, epoch: int) -> list[int]:
        """Returns the number of pairs of each corpus that all previous epochs have used."""
        taken = [0] * len(self._spans)
        for number, stage in enumerate(self._counts):
            epochs = min(epoch, self._epochs[number]) if number < len(self._epochs) else epoch
            taken = [before + epochs * count for before, count in zip(taken, stage, strict=True)]
            epoch -= epochs
        return taken

    def pairs(self, epoch: int) -> npt.NDArray[np.int32]:
        """Returns the pairs of an epoch, corpus after corpus, (M,)."""
        parts = [np.zeros(0, dtype=np.int32)]
        for corpus, (count, offset) in enumerate(zip(self.counts(epoch), self._taken(epoch), strict=True)):
            first, end = self._spans[corpus]
            while count:
                number, inside = divmod(offset, end - first)
                draw = np.random.Generator(np.random.PCG64([self._seed, number, corpus, _DRAWS]))
                part = draw.permutation(end - first)[inside : inside + count]
                parts.append((part + first).astype(np.int32))
                count, offset = count - len(part), offset + len(part)
        return np.concatenate(parts)


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Divides ``total`` by weights with the largest remainder method."""
    weight_sum = sum(weights)
    exact = [total * weight / weight_sum for weight in weights]
    counts = [int(share) for share in exact]
    by_rest = sorted(range(len(weights)), key=lambda corpus: counts[corpus] - exact[corpus])
    for corpus in by_rest[: total - sum(counts)]:
        counts[corpus] += 1
    return counts
