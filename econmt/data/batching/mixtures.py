"""Which pairs an epoch has when corpora are mixed by weight, in stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from econmt.config.recipe import Mixing
from econmt.errors import InputError

_DRAWS = 0x6D6978
"""Ends the seeds of these draws, so that no others have them."""


class Mixture:
    """The pairs of each epoch; they follow from the seed and the epoch alone.

    Each corpus is a stream of its own: all of its pairs in a random order, then all of them in another. An epoch takes
    up each stream where the epoch before has left it: no pair comes again before all others of its corpus have.

    Args:
        mixing: weights and epochs of the stages.
        firsts: the first pair of each corpus in the store. pairs: of the store.
        seed: of the orders.
        names: of the corpora, for messages.

    Raises:
        InputError: a corpus that has a weight is empty.
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
                    f"data.mixing.weights: nothing of {names[corpus]} is left to train with; give it the weight 0"
                )

    def counts(self, epoch: int) -> list[int]:
        """Pairs of each corpus in an epoch."""
        for stage, epochs in zip(self._counts, self._epochs, strict=False):
            if epoch < epochs:
                return stage
            epoch -= epochs
        return self._counts[-1]

    def _taken(self, epoch: int) -> list[int]:
        """Pairs that all epochs before have taken of each corpus."""
        taken = [0] * len(self._spans)
        for number, stage in enumerate(self._counts):
            epochs = min(epoch, self._epochs[number]) if number < len(self._epochs) else epoch
            taken = [before + epochs * count for before, count in zip(taken, stage, strict=True)]
            epoch -= epochs
        return taken

    def pairs(self, epoch: int) -> npt.NDArray[np.int32]:
        """(M,) the pairs of an epoch, corpus after corpus."""
        parts = [np.zeros(0, dtype=np.int32)]
        for corpus, (count, place) in enumerate(zip(self.counts(epoch), self._taken(epoch), strict=True)):
            first, end = self._spans[corpus]
            while count:
                number, inside = divmod(place, end - first)
                draw = np.random.Generator(np.random.PCG64([self._seed, number, corpus, _DRAWS]))
                part = draw.permutation(end - first)[inside : inside + count]
                parts.append((part + first).astype(np.int32))
                count, place = count - len(part), place + len(part)
        return np.concatenate(parts)


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """``total`` divided by weights, what is left over going to the largest remainders."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    counts = [int(share) for share in exact]
    by_rest = sorted(range(len(weights)), key=lambda corpus: counts[corpus] - exact[corpus])
    for corpus in by_rest[: total - sum(counts)]:
        counts[corpus] += 1
    return counts
