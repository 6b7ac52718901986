"""Batches: padded tensors of sentence pairs of like length, in an order fixed by seed and epoch.

An epoch is planned as a table with one row a batch, which depends only on how many pairs each bucket has:
every bucket gives as many full batches of its own shape as it can, and what remains does not become tiny batches.
Of derived buckets it goes into the next larger bucket; of fixed ones, which are many, it is put together, in the
order of their shapes, into batches of mixed shape, each padded to the longest of its buckets. Tensors are padded to the
bucket's shape, so that few shapes occur; :meth:`Batch.trimmed` cuts one to its own longest pair.

An epoch then shuffles the rows of the table, and the pairs inside each bucket: of a fixed one all; of a derived one
first those of the same two lengths among each other, then those that stand within a batch's size of each other in
the order of lengths, counted from another place in each epoch. So batches hold pairs of nearly the same lengths, and
which pairs share a batch changes with the epoch.

The stream knows nothing of ranks: each of several makes the same batches and takes its rows of them
(:meth:`econmt.data.batching.batch.AnyBatch.share`), so that the recipe's batch is that of one update over all ranks.

With BPE-dropout a pair is cut anew in every epoch, from a generator seeded by (seed, epoch, pair): neither
the batch, the rank nor the history matters, so a resumed run sees what an uninterrupted one sees. Buckets are
then made for the longer cut (see :func:`dropout_capacity`), and a cut that would not fit its bucket is drawn
again.

Where corpora are mixed by weight, or pairs get noise, each epoch has pairs and lengths of its own: it is planned anew,
with the same shapes, from seed and epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from econmt.config.recipe import BatchSize, Recipe
from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.batch import BatchShape as BatchShape
from econmt.data.batching.bpe_dropout import BpeDropout, dropout_capacity
from econmt.data.batching.bucket_shapes import Derived
from econmt.data.batching.buckets import Buckets, assign_buckets, round_up
from econmt.data.batching.changing_epochs import ChangingEpochs
from econmt.data.batching.epochs import EpochTable, mix, plan_epoch
from econmt.data.batching.mixtures import Mixture
from econmt.data.batching.noise import NoiseMaker
from econmt.data.batching.pair_flops import pair_flops
from econmt.data.batching.store import PreparedData
from econmt.data.batching.token_store import IntArray, TokenStore
from econmt.data.text.subwords import BOS, EOS, PAD


@dataclass(frozen=True)
class Batch(AnyBatch):
    """Padded sentence pairs; B rows, S source positions, T target positions, all tensors int64."""

    filler: ClassVar[Mapping[str, int]] = MappingProxyType({"indices": -1, "source_lengths": 1})
    """A row that stands in has one source position, since an attention cannot attend to none."""

    source: torch.Tensor
    """(B, S): tokens, ``</s>``, padding."""
    source_lengths: torch.Tensor
    """(B,): ``</s>`` counted."""
    target_input: torch.Tensor
    """(B, T): ``<s>``, tokens, padding."""
    target_output: torch.Tensor
    """(B, T): tokens, ``</s>``, padding."""
    target_lengths: torch.Tensor
    """(B,): ``</s>`` counted; 0 in a row that stands in."""
    source_tokens: int
    """Sum of ``source_lengths`` over real pairs: tokens that are not padding."""

    @property
    def positions(self) -> tuple[int, int]:
        """S and T."""
        return self.source.shape[1], self.target_output.shape[1]

    @property
    def size_text(self) -> str:
        """As "64 pairs, 20 source and 25 target positions"."""
        source, target = self.positions
        return f"{len(self.indices)} pairs, {source} source and {target} target positions"

    def trimmed(self) -> Batch:
        """The same pairs without the columns in which all have padding."""
        source = max(1, int(self.source_lengths.max()))
        target = max(1, int(self.target_lengths.max()))
        return replace(
            self,
            source=self.source[:, :source].contiguous(),
            target_input=self.target_input[:, :target].contiguous(),
            target_output=self.target_output[:, :target].contiguous(),
        )

    def part(self, rows: slice) -> Batch:
        """Some pairs, padded as before."""
        tensors = self._tensors(rows)
        real = tensors["indices"] >= 0
        return Batch(
            **tensors,
            source_tokens=int(tensors["source_lengths"][real].sum()),
            target_tokens=int(tensors["target_lengths"].sum()),
        )


def pad_batch(
    indices: IntArray,
    source: IntArray,
    source_lengths: IntArray,
    target: IntArray,
    target_lengths: IntArray,
    shape: tuple[int, int],
) -> Batch:
    """Make a batch from ids without sentence marks.

    Args:
        indices: (B,).
        source, target: (B, at least the longest row) ids; what lies past a row's length is not read.
        source_lengths, target_lengths: (B,), ``</s>`` not counted.
        shape: source and target positions of the result; each side has room for ``</s>``.
    """
    rows = len(indices)
    padded_source = _with_end(source, source_lengths, shape[0])
    target_output = _with_end(target, target_lengths, shape[1])
    target_input = np.full((rows, shape[1]), PAD, dtype=np.int64)
    target_input[:, 1:] = np.where(target_output[:, :-1] == EOS, PAD, target_output[:, :-1])
    target_input[:, 0] = BOS
    return Batch(
        source=torch.from_numpy(padded_source),
        source_lengths=torch.from_numpy(source_lengths.astype(np.int64) + 1),
        target_input=torch.from_numpy(target_input),
        target_output=torch.from_numpy(target_output),
        target_lengths=torch.from_numpy(target_lengths.astype(np.int64) + 1),
        indices=torch.from_numpy(indices.astype(np.int64)),
        source_tokens=int(source_lengths.sum()) + rows,
        target_tokens=int(target_lengths.sum()) + rows,
    )


def _with_end(ids: IntArray, lengths: IntArray, width: int) -> npt.NDArray[np.int64]:
    """Copy rows into a (B, width) array, ``</s>`` after each, padding after that."""
    padded = np.full((len(lengths), width), PAD, dtype=np.int64)
    columns = np.arange(ids.shape[1])
    inside = columns < lengths[:, None]
    padded[:, : ids.shape[1]][inside[:, :width]] = ids[inside]
    padded[np.arange(len(lengths)), lengths] = EOS
    return padded


def rows_of_batch(batch: BatchSize, target_positions: int) -> int:
    """Rows of a full batch with ``target_positions`` padded target positions: at least one."""
    return batch.size if batch.type == "sentence" else max(1, batch.size // target_positions)


class BatchIterator:
    """An endless stream of batches, epoch after epoch; the same (seed, epoch, position) gives the same batch."""

    def __init__(
        self,
        data: TokenStore | PreparedData,
        batch: BatchSize,
        rule: int | Derived,
        seed: int,
        *,
        max_length: int,
        mixture: Mixture | None = None,
        noise: NoiseMaker | None = None,
    ) -> None:
        """Plan the epochs.

        Args:
            data: prepared data, of which the training split is read, with BPE-dropout if its recipe asks for
                it; or a token store, without.
            batch: how many pairs an update takes.
            rule: a width, of which lengths are rounded up to multiples; or how buckets are derived.
            seed: of the order and of BPE-dropout.
            max_length: no side of a pair is longer than this many tokens, BPE-dropout and noise or not.
            mixture: which pairs an epoch has; None: all. noise: what becomes of them. Both need derived buckets.
        """
        self._store = data.train if isinstance(data, PreparedData) else data
        assert len(self._store) > 0, "an empty store is refused when it is made"
        self._dropout: BpeDropout | None = None
        capacity: IntArray | None = None
        if isinstance(data, PreparedData) and data.subword_dropout > 0.0:
            self._dropout = BpeDropout(data.vocabularies, data.subword_dropout)
            capacity = dropout_capacity(data.subword_dropout, max_length)
        self._rule, self._seed, self._batch, self._max_length = rule, seed, batch, max_length
        self._changing: ChangingEpochs | None = None
        if mixture is not None or noise is not None:
            assert isinstance(rule, Derived)
            self._changing = ChangingEpochs(self._store, mixture, noise, rule, capacity, max_length, seed)
            self._buckets, self._table = self._plan(self._changing.buckets(0))
        else:
            self._buckets, self._table = self._plan(
                assign_buckets(
                    self._store.source_lengths,
                    self._store.target_lengths,
                    rule,
                    capacity,
                    self._store.release,
                )
            )
        self._epoch, self._position = 0, 0
        self._planned_epoch, self._shuffled_epoch = 0, -1
        self._order = self._buckets.order.copy()
        self._permutation = np.zeros(0, dtype=np.int64)

    def _plan(self, buckets: Buckets) -> tuple[Buckets, EpochTable]:
        rows = [rows_of_batch(self._batch, target) for target in buckets.shapes[:, 1].tolist()]
        return buckets, plan_epoch(buckets.shapes, buckets.counts, rows, self._rule)

    def _go_to_epoch(self) -> None:
        """Plan the current epoch, if it is not planned and differs from the one that is."""
        if self._changing is not None and self._planned_epoch != self._epoch:
            self._buckets, self._table = self._plan(self._changing.buckets(self._epoch))
            self._order = self._buckets.order.copy()
            self._planned_epoch, self._shuffled_epoch = self._epoch, -1

    @property
    def store(self) -> TokenStore:
        """The pairs."""
        return self._store

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in the current epoch: the same in each, but for mixtures and noise."""
        self._go_to_epoch()
        return len(self._table.rows)

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands; JSON-able."""
        return {"epoch": self._epoch, "position": self._position, "batches_per_epoch": self.batches_per_epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to where :meth:`state_dict` was taken.

        If an epoch has another number of batches now (another batch size was asked for), the stream goes on
        at the same share of the epoch.
        """
        self._epoch = int(state["epoch"])
        then, now = int(state["batches_per_epoch"]), self.batches_per_epoch
        position = int(state["position"])
        self._position = position if then == now else min(position * now // then, now - 1)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._shuffle()
        row = int(self._permutation[self._position])
        batch = self._build(self._places_of(row, self._order), self._shape_of(row), self._epoch)
        self._position += 1
        if self._position == self.batches_per_epoch:
            self._epoch, self._position = self._epoch + 1, 0
        return batch

    def plan(self) -> Iterator[tuple[npt.NDArray[np.int32], tuple[int, int]]]:
        """The pairs and the shape of each batch of the current epoch, from its first; reads no text."""
        self._shuffle()
        for row in self._permutation.tolist():
            yield self._stored(self._places_of(row, self._order)), self._shape_of(row)

    def shapes(self) -> list[BatchShape]:
        """Every padded shape that batches of an epoch have, by rising target, then source positions.

        With BPE-dropout a batch may come out smaller than its shape here, never larger. Where epochs differ these are
        the shapes of all of them, each with the rows of a full batch, and with how many the current epoch has, at
        least 1.
        """
        self._go_to_epoch()
        if self._changing is not None:
            there = Counter(map(tuple, self._table.shapes.tolist()))
            return [
                BatchShape(source, target, rows_of_batch(self._batch, target), max(1, there[source, target]))
                for source, target in self._buckets.shapes.tolist()
            ]
        found: dict[tuple[int, int], list[int]] = {}
        for row, rows in enumerate(self._table.rows.tolist()):
            found.setdefault(self._shape_of(row), []).append(rows)
        return [
            BatchShape(source, target, max(rows), len(rows))
            for (source, target), rows in sorted(found.items(), key=lambda item: item[0][::-1])
        ]

    def worst_batch(self) -> Batch:
        """The batch that needs the most memory: the most rows x source x target positions of any in an epoch."""
        if self._changing is not None:
            worst = max(self.shapes(), key=lambda each: (each.rows * each.source * each.target, each.rows))
            return self.largest_batch(worst.source, worst.target)
        volume = self._table.rows * self._table.shapes[:, 0] * self._table.shapes[:, 1]
        positions = self._table.rows * self._table.shapes.sum(axis=1)
        return self._plain_batch(int(np.lexsort((positions, volume))[-1]))

    def largest_batch(self, source: int, target: int) -> Batch:
        """The batch with the most rows of those of this padded shape, one of :meth:`shapes`."""
        if self._changing is not None:  # some epoch may have it
            indices = self._changing.pairs_within(source, target, rows_of_batch(self._batch, target))
            return pad_batch(indices, *self._store.gather(indices), (source, target))
        alike = np.flatnonzero((self._table.shapes == (source, target)).all(axis=1))
        return self._plain_batch(int(alike[np.argmax(self._table.rows[alike])]))

    def _plain_batch(self, row: int) -> Batch:
        """A batch as the table has it: no epoch's order, no BPE-dropout."""
        indices = self._places_of(row, self._buckets.order)
        return pad_batch(indices, *self._store.gather(indices), self._shape_of(row))

    def _shape_of(self, row: int) -> tuple[int, int]:
        return int(self._table.shapes[row, 0]), int(self._table.shapes[row, 1])

    def _stored(self, places: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The pairs in the store that stand at places of the current epoch."""
        return places if self._changing is None else self._changing.epoch.pairs[places]

    def _places_of(self, row: int, order: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        start, end = int(self._table.starts[row]), int(self._table.starts[row] + self._table.rows[row])
        pairs = len(order)
        if start < pairs:
            return order[start:end]
        return order[self._table.remainders[start - pairs : end - pairs]]

    def _shuffle(self) -> None:
        """Bring pairs and batches into the order of the current epoch."""
        self._go_to_epoch()
        if self._shuffled_epoch == self._epoch:
            return
        draw = np.random.Generator(np.random.PCG64([self._seed, self._epoch]))
        np.copyto(self._order, self._buckets.order)
        start = 0
        for count in self._buckets.alike.tolist():
            draw.shuffle(self._order[start : start + count])
            start += count
        for first, end, rows in self._table.windows.tolist():
            mix(self._order[first:end], rows, draw)
        self._permutation = draw.permutation(len(self._table.rows))
        self._shuffled_epoch = self._epoch

    def _build(self, places: npt.NDArray[np.int32], shape: tuple[int, int], epoch: int) -> Batch:
        indices = self._stored(places)
        pairs = self._store.gather(indices)
        room = min(shape[0] - 1, self._max_length), min(shape[1] - 1, self._max_length)
        if self._changing is not None and self._changing.noise is not None:
            kinds = self._changing.epoch.kinds[places]
            pairs = self._changing.noise.apply(kinds, places, pairs, room, (self._seed, epoch))
        if self._dropout is not None:
            pairs = self._dropout.resample(indices, pairs, room, (self._seed, epoch))
        if self._dropout is not None or self._changing is not None:
            longest = int(pairs.source_lengths.max()) + 1, int(pairs.target_lengths.max()) + 1
            shape = self._shape_for(*longest, shape)
        return pad_batch(indices, *pairs, shape)

    def _shape_for(self, source: int, target: int, largest: tuple[int, int]) -> tuple[int, int]:
        """The shape for a batch whose pairs turned out shorter than they might have: no larger than ``largest``."""
        if not isinstance(self._rule, Derived):
            positions = round_up(np.array([source, target]), self._rule)
            return int(positions[0]), int(positions[1])
        shapes = [
            (s, t)
            for s, t in self._buckets.shapes.tolist()
            if source <= s <= largest[0] and target <= t <= largest[1]
        ]
        return min(shapes, key=lambda shape: (shape[0] * shape[1], shape))


def bucket_rule(recipe: Recipe, target_vocabulary: int) -> int | Derived:
    """How a recipe's pairs are put into buckets: a width, or that they are derived.

    Args:
        recipe: the run.
        target_vocabulary: entries of the output layer, on which the work of a target position depends.
    """
    training = recipe.training
    if training.bucket_width is not None:
        return training.bucket_width
    return Derived(training.max_buckets, pair_flops(recipe.translation_model, target_vocabulary))


def training_batches(recipe: Recipe, prepared: PreparedData) -> BatchIterator:
    """The batches of a recipe's training; see :class:`BatchIterator`.

    Raises:
        InputError: a corpus that is to be mixed is empty.
    """
    training, data = recipe.training, recipe.pairs
    store, mixture, noise = prepared.train, None, None
    if data.mixing.weights:
        mixture = Mixture(data.mixing, store.corpora, len(store), training.seed, data.train)
    if not data.noise.is_idle:
        noise = NoiseMaker(data.noise, prepared.vocabularies, data.tags, store)
    return BatchIterator(
        prepared,
        training.batch,
        bucket_rule(recipe, prepared.vocabularies.target.size),
        training.seed,
        max_length=data.max_length,
        mixture=mixture,
        noise=noise,
    )


def longer_than(store: TokenStore, longest_side: int) -> npt.NDArray[np.bool_]:
    """Which pairs have more tokens than ``longest_side`` on a side."""
    longest: npt.NDArray[np.bool_] = np.maximum(store.source_lengths, store.target_lengths) > longest_side
    return longest


def valid_batches(store: TokenStore, batch_size: int, longest_side: int | None = None) -> Iterator[Batch]:
    """Every pair once, without shuffling, pairs of like length together, padded to the longest of the batch.

    Pairs with more tokens than ``longest_side`` on a side are left out: one line of a million would hold up all others.
    """
    order = np.lexsort((store.source_lengths, store.target_lengths))
    if longest_side is not None:
        order = order[~longer_than(store, longest_side)[order]]
    for first in range(0, len(order), batch_size):
        indices = order[first : first + batch_size]
        pairs = store.gather(indices)
        longest = int(pairs.source_lengths.max()) + 1, int(pairs.target_lengths.max()) + 1
        yield pad_batch(indices, *pairs, longest)
    store.release()
