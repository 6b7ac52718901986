"""Epochs whose pairs or lengths differ from epoch to epoch, because of mixing or noise.

Bucket shapes are the same in every epoch, derived from all pairs of the store with and without noise, so that shapes
stay few and memory can be planned.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.data.batching.bucket_shapes import Derived, choose
from econmt.data.batching.buckets import Buckets, assign_buckets, assign_lengths, count_lengths
from econmt.data.batching.mixtures import Mixture
from econmt.data.batching.noise import Kinds, NoiseMaker
from econmt.data.batching.token_store import IntArray, TokenStore

_SHAPES = 2**32 - 1
"""Epoch number whose noise is used to derive the shapes."""


class Epoch(NamedTuple):
    """Pairs of one epoch, M positions."""

    pairs: npt.NDArray[np.int32]
    """Index of the pair in the store, (M,)."""
    kinds: Kinds
    """Bits of the noise that the pair gets, see :mod:`econmt.data.batching.noise`, (M,)."""


class ChangingEpochs:
    """Generator of epochs with mixing or noise, deterministic by seed and epoch number.

    Args:
        store: token store of the pairs. mixture: selects the pairs of an epoch; None: all.
        noise: changes pairs; None: no noise.
        rule: bucket rule. capacity: see :func:`econmt.data.batching.buckets.count_lengths`.
        max_length: maximum number of tokens on a side. seed: seed of the noise.
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
        self._shapes = assign_lengths(count_lengths(*lengths, capacity), rule)[0]
        store.release()
        self.epoch = Epoch(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8))
        """Epoch of the latest call of :meth:`buckets`."""

    def buckets(self, epoch: int) -> Buckets:
        """Draws an epoch and assigns its positions to buckets."""
        pairs = np.arange(len(self._store), dtype=np.int32)
        if self._mixture is not None:
            pairs = self._mixture.pairs(epoch)
        source, target = self._store.source_lengths[pairs], self._store.target_lengths[pairs]
        kinds = np.zeros(len(pairs), dtype=np.uint8)
        if self.noise is not None:
            kinds = self.noise.draw(len(pairs), (self._seed, epoch))
            noisy_source, noisy_target = self.noise.lengths(kinds, source, target, self._max_length)
            too_long = ~self._fit(noisy_source, noisy_target)
            kinds[too_long] = 0
            source = np.where(too_long, source, noisy_source)
            target = np.where(too_long, target, noisy_target)
        self._store.release()
        self.epoch = Epoch(pairs, kinds)
        return assign_buckets(source, target, self._rule, self._capacity, shapes=self._shapes)

    def _fit(self, source: IntArray, target: IntArray) -> npt.NDArray[np.bool_]:
        """Returns a mask (M,) of the lengths that some shape has room for."""
        if self._capacity is not None:
            source, target = self._capacity[source], self._capacity[target]
        grid = choose((int(source.max()) + 2, int(target.max()) + 2), self._shapes, self._rule.work)
        fits: npt.NDArray[np.bool_] = grid[source + 1, target + 1] >= 0
        return fits

    def pairs_within(self, source: int, target: int, count: int) -> npt.NDArray[np.int32]:
        """Returns pairs of the store that fit a shape, including ``</s>``, (count,); repeated if there are too few."""
        fits = (self._store.source_lengths < source) & (self._store.target_lengths < target)
        indices = np.flatnonzero(fits)[-count:].astype(np.int32)
        self._store.release()
        return np.resize(indices, count)
