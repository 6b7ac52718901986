"""Batches of sentence pairs of similar length, padded to few shapes, in an order fixed by seed and epoch.

An epoch is planned as a table with one row per batch. Every bucket gives as many full batches of its shape as it can.
The remaining pairs of a derived bucket go into the next larger bucket; those of fixed buckets, which are many, are
combined in the order of their shapes into batches of mixed shape, padded to the longest bucket. Padding to bucket
shapes keeps the number of tensor shapes small; :meth:`Batch.trimmed` cuts a batch to its longest pair.

Each epoch shuffles the rows of the table and the pairs inside each bucket: all pairs of a fixed bucket; in a derived
one, first pairs of equal lengths, then pairs within windows of one batch in the order of lengths, with a window offset
that differs between epochs. Batches so hold pairs of nearly equal lengths, but different ones in each epoch.

The stream is the same on every rank; each rank takes its rows of a batch
(:meth:`econmt.data.batching.batch.AnyBatch.share`), so that the recipe's batch size is that of one update over all
ranks.

With BPE-dropout a pair is segmented again in every epoch by a generator seeded with (seed, epoch, pair), so that
neither batch, rank nor a resumed run changes the result. Buckets then have room for longer segmentations (see
:func:`dropout_capacity`), and a segmentation that does not fit is drawn again.

With mixing or noise, the pairs and lengths of each epoch differ; it is planned again from seed and epoch, with the same
shapes.
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

from econmt.config.recipe import BatchSize, Recipe, SentencePieceSubwords
from econmt.data.batching.batch import AnyBatch, Batches
from econmt.data.batching.batch import BatchShape as BatchShape
from econmt.data.batching.bpe_dropout import BpeDropout, dropout_capacity
from econmt.data.batching.bucket_shapes import MOST_PRICED, SHAPE_PRICE, Derived
from econmt.data.batching.buckets import Buckets, assign_buckets, round_up
from econmt.data.batching.changing_epochs import ChangingEpochs
from econmt.data.batching.epochs import mix, plan_epoch
from econmt.data.batching.mixtures import Mixture
from econmt.data.batching.noise import NoiseMaker
from econmt.data.batching.pair_flops import pair_flops
from econmt.data.batching.pair_guides import PairGuides
from econmt.data.batching.store import PreparedData
from econmt.data.batching.token_store import IntArray, PairIds, TokenStore
from econmt.data.text.vocabulary import BOS, EOS, PAD


@dataclass(frozen=True)
class Batch(AnyBatch):
    """Padded sentence pairs: B rows, S source positions, T target positions, all tensors int64."""

    filler: ClassVar[Mapping[str, int]] = MappingProxyType({"indices": -1, "source_lengths": 1})
    """Values of padding rows; they have one source position, because attention over none is undefined."""

    source: torch.Tensor
    """Source tokens, ``</s>``, padding, (B, S)."""
    source_lengths: torch.Tensor
    """Source lengths including ``</s>``, (B,)."""
    target_input: torch.Tensor
    """Decoder input: ``<s>``, tokens, padding, (B, T)."""
    target_output: torch.Tensor
    """Tokens to predict: tokens, ``</s>``, padding, (B, T)."""
    target_lengths: torch.Tensor
    """Target lengths including ``</s>``, (B,); 0 for padding rows."""
    source_tokens: int
    """Number of source tokens, padding excluded."""
    alignment: torch.Tensor | None = None
    """1 where a source token is aligned to a target token, else 0, (B, T, S); None without alignments."""
    weights: torch.Tensor | None = None
    """Weights of the pairs' losses in units of :data:`econmt.data.text.guides.WEIGHT_UNIT`, (B,); None without."""

    @property
    def positions(self) -> tuple[int, int]:
        """Padded numbers of source and target positions, S and T."""
        return self.source.shape[1], self.target_output.shape[1]

    @property
    def size_text(self) -> str:
        """Size of the batch, as "64 pairs, 20 source and 25 target positions"."""
        source, target = self.positions
        return f"{len(self.indices)} pairs, {source} source and {target} target positions"

    def trimmed(self) -> Batch:
        """Returns the batch without the columns in which all pairs have padding."""
        source = max(1, int(self.source_lengths.max()))
        target = max(1, int(self.target_lengths.max()))
        return replace(
            self,
            source=self.source[:, :source].contiguous(),
            target_input=self.target_input[:, :target].contiguous(),
            target_output=self.target_output[:, :target].contiguous(),
            alignment=None if self.alignment is None else self.alignment[:, :target, :source].contiguous(),
        )

    def part(self, rows: slice) -> Batch:
        """Returns some pairs, with the same padding."""
        tensors = self._tensors(rows)
        real = tensors["indices"] >= 0
        return Batch(
            **tensors,
            rate=self.rate,
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
    guides: PairGuides | None = None,
) -> Batch:
    """Builds a batch from token ids without ``<s>`` and ``</s>``.

    Args:
        indices: indices of the pairs in the store, (B,).
        source, target: ids, (B, at least the longest row); values past a row's length are ignored.
        source_lengths, target_lengths: lengths without ``</s>``, (B,).
        shape: source and target positions of the batch; each has room for ``</s>``.
        guides: alignments and weights of the store's pairs.
    """
    rows = len(indices)
    alignment = weights = None
    if guides is not None:
        pairs = PairIds(source, source_lengths, target, target_lengths)
        alignment, weights = guides.alignment(indices, pairs, shape), guides.store.weights(indices)
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
        alignment=None if alignment is None else torch.from_numpy(alignment),
        weights=None if weights is None else torch.from_numpy(weights),
    )


def _with_end(ids: IntArray, lengths: IntArray, width: int) -> npt.NDArray[np.int64]:
    """Copies rows into a (B, width) array, each followed by ``</s>`` and padding."""
    padded = np.full((len(lengths), width), PAD, dtype=np.int64)
    columns = np.arange(ids.shape[1])
    inside = columns < lengths[:, None]
    padded[:, : ids.shape[1]][inside[:, :width]] = ids[inside]
    padded[np.arange(len(lengths)), lengths] = EOS
    return padded


def rows_of_batch(batch: BatchSize, target_positions: int) -> int:
    """Returns the number of rows of a full batch with ``target_positions`` padded target positions, at least 1."""
    return batch.size if batch.type == "sentence" else max(1, batch.size // target_positions)


class BatchIterator(Batches[Batch]):
    """Endless stream of batches of sentence pairs.

    Args:
        store: token store of the pairs.
        batch: size of a batch.
        rule: width to whose multiples lengths are rounded up, or the rule that derives buckets.
        seed: seed of the order, of noise and of BPE-dropout.
        max_length: maximum number of tokens on a side, also after BPE-dropout and noise.
        mixture: selects the pairs of an epoch; None: all. noise: changes them. Both need derived buckets.
        dropout: BPE-dropout; None: pairs keep their stored segmentation.
        guides: alignments and weights of the pairs; None without any.
    """

    def __init__(
        self,
        store: TokenStore,
        batch: BatchSize,
        rule: int | Derived,
        seed: int,
        *,
        max_length: int,
        mixture: Mixture | None = None,
        noise: NoiseMaker | None = None,
        dropout: BpeDropout | None = None,
        guides: PairGuides | None = None,
    ) -> None:
        super().__init__()
        assert len(store) > 0, "an empty store is refused when it is made"
        self._guides = guides
        self.store, self._dropout, self._batch_size = store, dropout, batch
        capacity = None if dropout is None else dropout_capacity(dropout.probability, max_length)
        self._rule, self._seed, self._max_length = rule, seed, max_length
        self._changing: ChangingEpochs | None = None
        if mixture is not None or noise is not None:
            assert isinstance(rule, Derived)
            self._changing = ChangingEpochs(store, mixture, noise, rule, capacity, max_length, seed)
            self._plan(self._changing.buckets(0))
        else:
            lengths = store.source_lengths, store.target_lengths
            self._plan(assign_buckets(*lengths, rule, capacity, store.release))
        self._permutation = np.zeros(0, dtype=np.int64)

    def _plan(self, buckets: Buckets) -> None:
        """Plans the current epoch with these buckets."""
        rows = [rows_of_batch(self._batch_size, target) for target in buckets.shapes[:, 1].tolist()]
        self._table = plan_epoch(buckets.shapes, buckets.counts, rows, self._rule)
        self._buckets, self._order = buckets, buckets.order.copy()
        self._planned_epoch, self._shuffled_epoch = self.epoch, -1

    def _go_to_epoch(self) -> None:
        """Plans the current epoch if epochs differ and another one is planned."""
        if self._changing is not None and self._planned_epoch != self.epoch:
            self._plan(self._changing.buckets(self.epoch))

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in the current epoch; differs between epochs only with mixing or noise."""
        self._go_to_epoch()
        return len(self._table.rows)

    def _batch(self, position: int) -> Batch:
        self._shuffle()
        row = int(self._permutation[position])
        return self._build(self._positions_of(row, self._order), self._shape_of(row), self.epoch)

    def plan(self) -> Iterator[tuple[npt.NDArray[np.int32], tuple[int, int]]]:
        """Yields the pairs and the shape of each batch of the current epoch, without reading text."""
        self._shuffle()
        for row in self._permutation.tolist():
            yield self._store_indices(self._positions_of(row, self._order)), self._shape_of(row)

    def shapes(self) -> list[BatchShape]:
        """Returns all padded shapes of the batches of an epoch, sorted by target, then source positions.

        With BPE-dropout a batch can be smaller than its shape here, never larger. With mixing or noise these are the
        shapes of all epochs, each with the rows of a full batch and its count in the current epoch, at least 1.
        """
        self._go_to_epoch()
        if self._changing is not None:
            counts, size = Counter(map(tuple, self._table.shapes.tolist())), self._batch_size
            return [
                BatchShape(source, target, rows_of_batch(size, target), max(1, counts[source, target]))
                for source, target in self._buckets.shapes.tolist()
            ]
        rows_by_shape: dict[tuple[int, int], list[int]] = {}
        for row, rows in enumerate(self._table.rows.tolist()):
            rows_by_shape.setdefault(self._shape_of(row), []).append(rows)
        return [
            BatchShape(source, target, max(rows), len(rows))
            for (source, target), rows in sorted(rows_by_shape.items(), key=lambda item: item[0][::-1])
        ]

    def worst_batch(self) -> Batch:
        """Returns the batch that needs the most memory: the largest rows x source x target positions of an epoch."""
        if self._changing is not None:
            worst = max(self.shapes(), key=lambda each: (each.rows * each.source * each.target, each.rows))
            return self.largest_batch(worst.source, worst.target)
        volume = self._table.rows * self._table.shapes[:, 0] * self._table.shapes[:, 1]
        positions = self._table.rows * self._table.shapes.sum(axis=1)
        return self._unshuffled_batch(int(np.lexsort((positions, volume))[-1]))

    def largest_batch(self, source: int, target: int) -> Batch:
        """Returns the batch with the most rows of this padded shape, one of :meth:`shapes`."""
        if self._changing is not None:  # epochs differ; any of them may contain this batch
            indices = self._changing.pairs_within(source, target, rows_of_batch(self._batch_size, target))
            return pad_batch(indices, *self.store.gather(indices), (source, target), self._guides)
        alike = np.flatnonzero((self._table.shapes == (source, target)).all(axis=1))
        return self._unshuffled_batch(int(alike[np.argmax(self._table.rows[alike])]))

    def _unshuffled_batch(self, row: int) -> Batch:
        """Builds batch ``row`` of the table in stored order and without BPE-dropout."""
        indices = self._positions_of(row, self._buckets.order)
        return pad_batch(indices, *self.store.gather(indices), self._shape_of(row), self._guides)

    def _shape_of(self, row: int) -> tuple[int, int]:
        return int(self._table.shapes[row, 0]), int(self._table.shapes[row, 1])

    def _store_indices(self, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Maps positions in the current epoch to pairs of the store."""
        return positions if self._changing is None else self._changing.epoch.pairs[positions]

    def _positions_of(self, row: int, order: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        start, end = int(self._table.starts[row]), int(self._table.starts[row] + self._table.rows[row])
        pairs = len(order)
        if start < pairs:
            return order[start:end]
        return order[self._table.remainders[start - pairs : end - pairs]]

    def _shuffle(self) -> None:
        """Shuffles pairs and batches for the current epoch."""
        self._go_to_epoch()
        if self._shuffled_epoch == self.epoch:
            return
        draw = np.random.Generator(np.random.PCG64([self._seed, self.epoch]))
        np.copyto(self._order, self._buckets.order)
        start = 0
        for count in self._buckets.alike.tolist():
            draw.shuffle(self._order[start : start + count])
            start += count
        for first, end, rows in self._table.windows.tolist():
            mix(self._order[first:end], rows, draw)
        self._permutation = draw.permutation(len(self._table.rows))
        self._shuffled_epoch = self.epoch

    def _build(self, positions: npt.NDArray[np.int32], shape: tuple[int, int], epoch: int) -> Batch:
        indices = self._store_indices(positions)
        pairs = self.store.gather(indices)
        max_lengths = min(shape[0] - 1, self._max_length), min(shape[1] - 1, self._max_length)
        if self._changing is not None and self._changing.noise is not None:
            kinds = self._changing.epoch.kinds[positions]
            pairs = self._changing.noise.apply(kinds, positions, pairs, max_lengths, (self._seed, epoch))
        if self._dropout is not None:
            pairs = self._dropout.resample(indices, pairs, max_lengths, (self._seed, epoch))
        if self._dropout is not None or self._changing is not None:
            longest = int(pairs.source_lengths.max()) + 1, int(pairs.target_lengths.max()) + 1
            shape = self._shape_for(*longest, shape)
        return pad_batch(indices, *pairs, shape, self._guides)

    def _shape_for(self, source: int, target: int, largest: tuple[int, int]) -> tuple[int, int]:
        """Returns the smallest shape for the actual lengths of a batch, at most ``largest``."""
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
    """Returns the bucket rule of a recipe: the width of fixed buckets, or the rule that derives buckets.

    The size of the output layer, ``target_vocabulary``, decides on the cost of a target position.
    """
    width = recipe.training.bucket_width
    return derived_rule(recipe, target_vocabulary) if width is None else width


def derived_rule(recipe: Recipe, target_vocabulary: int) -> Derived:
    """Returns the rule that derives buckets for a recipe, whether it uses them or not."""
    work, most = pair_flops(recipe.translation_model, target_vocabulary), recipe.training.max_buckets
    return Derived(MOST_PRICED, work, SHAPE_PRICE) if most is None else Derived(most, work)


def training_batches(recipe: Recipe, prepared: PreparedData) -> BatchIterator:
    """Returns the training batches of a recipe; raises InputError if a corpus with a mixing weight is empty."""
    training, data = recipe.training, recipe.pairs
    store, mixture, noise = prepared.train, None, None
    if data.mixing.weights:
        mixture = Mixture(data.mixing, store.corpora, len(store), training.seed, data.train)
    if not data.noise.is_default:
        noise = NoiseMaker(data.noise, prepared.vocabularies, data.tags, store, (data.source, data.target))
    dropout = data.subwords.dropout if isinstance(data.subwords, SentencePieceSubwords) else 0.0
    return BatchIterator(
        store,
        training.batch,
        bucket_rule(recipe, prepared.vocabularies.target.size),
        training.seed,
        max_length=data.max_length,
        mixture=mixture,
        noise=noise,
        dropout=BpeDropout(prepared.vocabularies, dropout) if dropout else None,
        guides=PairGuides.of(store, prepared.train_links, prepared.vocabularies),
    )


def longer_than(store: TokenStore, longest_side: int) -> npt.NDArray[np.bool_]:
    """Returns a mask (N,) of the pairs with more than ``longest_side`` tokens on a side."""
    longest: npt.NDArray[np.bool_] = np.maximum(store.source_lengths, store.target_lengths) > longest_side
    return longest


def valid_batches(
    store: TokenStore, batch_size: int, longest_side: int | None = None, guides: PairGuides | None = None
) -> Iterator[Batch]:
    """Yields every pair once, sorted by length and padded to the longest pair of its batch.

    Leaves out pairs with more than ``longest_side`` tokens on a side; a single huge line would delay all others.
    """
    order = np.lexsort((store.source_lengths, store.target_lengths))
    if longest_side is not None:
        order = order[~longer_than(store, longest_side)[order]]
    for first in range(0, len(order), batch_size):
        indices = order[first : first + batch_size]
        pairs = store.gather(indices)
        longest = int(pairs.source_lengths.max()) + 1, int(pairs.target_lengths.max()) + 1
        yield pad_batch(indices, *pairs, longest, guides)
    store.release()
