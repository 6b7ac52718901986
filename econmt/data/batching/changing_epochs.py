"""Epochs whose pairs, or the lengths of these, are not those of the epoch before: mixtures and noise.

Their buckets have the same shapes in every epoch, those that suit all pairs of the store as they are and once more with
noise, so that training sees few shapes and memory can be planned.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.data.batching.bucket_shapes import Derived, choose
from econmt.data.batching.buckets import Buckets, assign_buckets, count_lengths, place
from econmt.data.batching.mixtures import Mixture
from econmt.data.batching.noise import Kinds, NoiseMaker
from econmt.data.batching.token_store import IntArray, TokenStore

_SHAPES = 2**32 - 1
"""The epoch whose noise stands for that of all when shapes are derived."""


class Epoch(NamedTuple):
    """What stands at the M places of an epoch."""

    pairs: npt.NDArray[np.int32]
    """(M,): the pair of the store."""
    kinds: Kinds
    """(M,): bits of :mod:`econmt.data.batching.noise`."""


class ChangingEpochs:
    """Makes epochs from seed and epoch.

    Args:
        store: the pairs. mixture: which of them an epoch has; None: all of them.
        noise: what becomes of them; None: nothing.
        rule: how buckets are derived. capacity: see :func:`econmt.data.batching.buckets.count_lengths`.
        max_length: no side is longer than this many tokens. seed: of noise.
    """

    def __init__(
        self,
        store: TokenStore,
        mixture: Mixture | None,
        noise: NoiseMaker | None,
        rule: Derived,
        capacity: IntArray | None,
        max_length: int,
        seed: int,
    ) -> None:
        self._store, self._mixture, self.noise = store, mixture, noise
        self._rule, self._capacity, self._max_length, self._seed = rule, capacity, max_length, seed
        lengths = store.source_lengths, store.target_lengths
        if noise is not None:
            changed = noise.lengths(noise.draw(len(store), (seed, _SHAPES)), *lengths, max_length)
            lengths = np.concatenate([lengths[0], changed[0]]), np.concatenate([lengths[1], changed[1]])
        self._shapes = place(count_lengths(*lengths, capacity), rule)[0]
        store.release()
        self.epoch = Epoch(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8))
        """The one of which :meth:`buckets` were asked for last."""

    def buckets(self, epoch: int) -> Buckets:
        """The places of an epoch, put into buckets."""
        pairs = (
            np.arange(len(self._store), dtype=np.int32)
            if self._mixture is None
            else self._mixture.pairs(epoch)
        )
        source, target = self._store.source_lengths[pairs], self._store.target_lengths[pairs]
        kinds = np.zeros(len(pairs), dtype=np.uint8)
        if self.noise is not None:
            kinds = self.noise.draw(len(pairs), (self._seed, epoch))
            wanted = self.noise.lengths(kinds, source, target, self._max_length)
            too_long = ~self._fit(*wanted)
            kinds[too_long] = 0
            source, target = np.where(too_long, source, wanted[0]), np.where(too_long, target, wanted[1])
        self._store.release()
        self.epoch = Epoch(pairs, kinds)
        return assign_buckets(source, target, self._rule, self._capacity, shapes=self._shapes)

    def _fit(self, source: IntArray, target: IntArray) -> npt.NDArray[np.bool_]:
        """Which lengths (M,) some shape has room for."""
        if self._capacity is not None:
            source, target = self._capacity[source], self._capacity[target]
        grid = choose((int(source.max()) + 2, int(target.max()) + 2), self._shapes, self._rule.work)
        fits: npt.NDArray[np.bool_] = grid[source + 1, target + 1] >= 0
        return fits

    def pairs_within(self, source: int, target: int, count: int) -> npt.NDArray[np.int32]:
        """(count,) pairs of the store that a shape has room for, ``</s>`` counted; again and again if they are few."""
        fit = (self._store.source_lengths < source) & (self._store.target_lengths < target)
        found = np.flatnonzero(fit)[-count:].astype(np.int32)
        self._store.release()
        return np.resize(found, count)
