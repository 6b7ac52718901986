"""Bucket shapes: the few shapes to which sentence pairs are padded, derived from the lengths of a text.

A shape (S, T) holds pairs of at most S source and T target positions; each of them costs work(S, T). The best nested
shapes, R_1 in R_2 in ... in R_k, are found exactly by dynamic programming: with C(R) the number of pairs that R holds,

    cost_j(R) = min over R' in R of  cost_{j-1}(R') + (C(R) - C(R')) work(R),        cost_1(R) = C(R) work(R)

and cost_k of the shape that holds all pairs is the minimum. The two sides of a translation have similar lengths, so
that few shapes which are not nested hardly help: an exhaustive search found none better on any text tried. For texts
whose lengths are unrelated, a grid of fixed buckets with no more shapes is taken instead if it costs less.

Nested shapes alone pad 5 % however many they are, because sources of one target length differ in length. Where many
shapes pay, each of 12 to 48 nested ones is therefore divided further: (S, T) into (S', T) and (S, T), at the S' that
saves the most work, as long as a division saves more than a shape costs.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.data.batching.pair_flops import PairFlops
from econmt.data.batching.token_store import IntArray

_MOST_LENGTHS = 100
"""Maximum number of candidate lengths per side; of more, half are spaced evenly by pairs and half by length."""

_SHAPE_SECONDS = 0.05
"""Seconds that a training step of one more shape takes on a GPU: a first run, and the capture of its CUDA graph."""
GRAPH_BYTES = 4_200_000
"""Bytes of a GPU that a CUDA graph of one more shape takes at most."""
_OPERATIONS_PER_SECOND = 14e12
"""Operations a second of a small model's training step on a GPU: those of ``multi30k``."""
_EPOCHS = 40
"""Epochs of the run for whose sake shapes are made; no key of a recipe, since a run that goes on keeps its shapes."""
SHAPE_PRICE = int(_SHAPE_SECONDS * _OPERATIONS_PER_SECOND / (3 * _EPOCHS))
"""Operations that a further shape has to save in an epoch's forward passes; a backward pass has twice as many."""
MOST_PRICED = (512 << 20) // GRAPH_BYTES
"""Maximum number of shapes whose number follows from their price: the graphs of all of them take 512 MiB."""
LEAST_PRICED, _MOST_NESTED = 12, 48
"""Number of shapes that are always made, and of nested shapes of which some may be divided."""
_FEW_LENGTHS = 64
"""Candidate lengths per side where shapes are many."""

Ints = npt.NDArray[np.int64]
Counts = Ints
"""Number of pairs with s source and t target positions including ``</s>``, (S + 1, T + 1)."""


class Derived(NamedTuple):
    """Bucket rule: at most ``most`` shapes, those with the least padded work."""

    most: int
    work: PairFlops
    price: int = 0
    """Operations of an epoch that a further shape has to save beyond the twelfth; 0: all ``most`` shapes are made."""


def derive_shapes(counts: Counts, rule: Derived) -> npt.NDArray[np.int64]:
    """Returns the shapes with the least padded work for a text.

    Returns:
        Source and target positions of K <= ``rule.most`` shapes, (K, 2), sorted by target, then source positions. The
        last one holds all pairs.
    """
    assert counts.any()
    if rule.price:
        return _priced_shapes(counts, rule)
    work = rule.work.scaled()
    found = [nested_shapes(counts, Derived(rule.most, work)), *_grids(counts, rule.most)]
    return min(found, key=lambda shapes: padded_work(counts, shapes, work))


def _grids(counts: Counts, most: int) -> list[Ints]:
    """Returns the fixed buckets of each width that has at most ``most`` of them."""
    grids = (grid_shapes(counts, width) for width in range(1, max(counts.shape)))
    return [grid for grid in grids if len(grid) <= most]


def grid_shapes(counts: Counts, width: int) -> npt.NDArray[np.int64]:
    """Returns the non-empty fixed buckets of a width, (K, 2), sorted by target, then source positions."""
    cells = np.unique(-(-np.argwhere(counts.T) // width) * width, axis=0)
    shapes: Ints = np.ascontiguousarray(cells[:, ::-1])
    return shapes


def nested_shapes(counts: Counts, rule: Derived) -> npt.NDArray[np.int64]:
    """Returns the best nested shapes, (K, 2), smallest first; see the module docstring."""
    return _trace(rule.most, *_chains(counts, rule, _MOST_LENGTHS))


def _chains(counts: Counts, rule: Derived, most_lengths: int) -> tuple[Ints, Ints, Ints]:
    """Finds the best nested shapes of each number up to ``rule.most``.

    Returns:
        Backpointers, (most, rows, columns), and the candidate lengths of both sides, (rows,) and (columns,).
    """
    sources, targets = (_candidates(counts.sum(axis=axis), most_lengths) for axis in (1, 0))
    pairs_held = counts.cumsum(axis=0).cumsum(axis=1)[np.ix_(sources, targets)].astype(np.float64)
    work = rule.work.of(sources[:, None], targets[None, :]).astype(np.float64)
    rows, columns = pairs_held.shape
    # Shapes of which no pair has the full length on a side are skipped: a smaller shape holds the same pairs.
    same_above = np.zeros_like(pairs_held, dtype=bool)
    same_above[1:] |= pairs_held[1:] == pairs_held[:-1]
    same_above[:, 1:] |= pairs_held[:, 1:] == pairs_held[:, :-1]
    same_above[-1, -1] = False
    costs = np.full((rule.most, rows, columns), np.inf)
    before = np.zeros((rule.most, rows, columns), dtype=np.int64)
    for row in range(rows):
        for column in range(columns):
            if same_above[row, column]:
                continue
            price, everything = work[row, column], pairs_held[row, column] * work[row, column]
            inner = costs[:-1, : row + 1, : column + 1] - pairs_held[: row + 1, : column + 1] * price
            flat = inner.reshape(rule.most - 1, (row + 1) * (column + 1))
            flat[:, -1] = np.inf  # the shape itself
            positions = flat.argmin(axis=1)
            candidates = everything + np.append(0.0, flat[np.arange(len(flat)), positions])
            costs[:, row, column] = np.minimum.accumulate(candidates)
            # Where one more shape does not help, the backpointer stays at this shape.
            origins = np.append(0, positions // (column + 1) * columns + positions % (column + 1))
            position = row * columns + column
            before[:, row, column] = np.where(costs[:, row, column] < candidates, position, origins)
    return before, sources, targets


def _priced_shapes(counts: Counts, rule: Derived) -> Ints:
    """Returns the shapes whose padded work, with a price for each, is the least that was found."""
    work, price = rule.work.scaled(), rule.price / rule.work.unit
    most_nested = min(rule.most, _MOST_NESTED)
    chains = _chains(counts, Derived(most_nested, work), _FEW_LENGTHS)
    found = [
        _divided(counts, _trace(number, *chains), work, rule.most, price)
        for number in range(LEAST_PRICED, most_nested + 1, 4)
    ]
    found += _grids(counts, rule.most)
    best = min(found, key=lambda shapes: padded_work(counts, shapes, work) + price * len(shapes))
    return best if len(best) > LEAST_PRICED else derive_shapes(counts, Derived(LEAST_PRICED, rule.work))


def _divided(counts: Counts, shapes: Ints, work: PairFlops, most: int, price: float) -> Ints:
    """Divides sources of shapes (K, 2) as long as a division saves more work than ``price``, to at most ``most``."""
    chosen = choose(counts.shape, shapes, work)
    divided, divisions = shapes.tolist(), list[tuple[float, int, int, int, int]]()

    def consider(number: int, first: int, end: int) -> None:
        """Finds the best division of the pairs of a shape with sources of ``first`` to ``end`` positions."""
        pairs = np.cumsum(sources[number][first : end + 1])
        saved = pairs * np.arange(end - first, -1, -1) * unit[number]
        at = int(saved.argmax())
        heapq.heappush(divisions, (-float(saved[at]), number, first, first + at, end))

    sources = [np.where(chosen == number, counts, 0).sum(axis=1) for number in range(len(shapes))]
    unit = (work.source + work.pair * shapes[:, 1]).astype(np.float64)
    for number, (source, _) in enumerate(shapes.tolist()):
        consider(number, 0, source)
    while divisions and len(divided) < most:
        saved, number, first, source, end = heapq.heappop(divisions)
        if -saved <= price:
            break
        divided.append([source, int(shapes[number, 1])])
        consider(number, first, source)
        consider(number, source + 1, end)
    return np.array(sorted(divided, key=lambda shape: shape[::-1]), dtype=np.int64)


def _trace(number_of_shapes: int, before: Ints, sources: IntArray, targets: IntArray) -> Ints:
    """Follows the backpointers ``before`` from the shape of all pairs; returns the shapes, smallest first."""
    row, column = len(sources) - 1, len(targets) - 1
    shapes: list[tuple[int, int]] = []
    for number in reversed(range(number_of_shapes)):
        shape = int(sources[row]), int(targets[column])
        if not shapes or shapes[-1] != shape:
            shapes.append(shape)
        row, column = divmod(int(before[number, row, column]), len(targets))
    return np.array(shapes[::-1], dtype=np.int64)


def _candidates(pairs: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """Returns the candidate lengths of shapes: all that occur, or a selection of ``most`` if they are more."""
    lengths = np.flatnonzero(pairs)
    if len(lengths) <= most:
        return lengths
    half = most // 2
    shares = np.arange(1, half + 1) * (pairs.sum() / half)
    even_in_pairs = np.searchsorted(pairs.cumsum(), shares * (1 - 1e-12))
    even_in_length = lengths[np.linspace(0, len(lengths) - 1, half).round().astype(int)]
    return np.unique(np.concatenate([np.minimum(even_in_pairs, lengths[-1]), even_in_length]))


def choose(shape: tuple[int, int], shapes: npt.NDArray[np.int64], work: PairFlops) -> npt.NDArray[np.int32]:
    """Returns, for every pair of lengths, the shape of ``shapes`` (K, 2) with the least work that holds it.

    Returns:
        Row indices into ``shapes``, of ``shape`` (S + 1, T + 1); -1 where no shape is large enough.
    """
    chosen = np.full(shape, -1, dtype=np.int32)
    prices = work.of(shapes[:, 0], shapes[:, 1])
    for index in np.argsort(-prices, kind="stable").tolist():
        source, target = shapes[index].tolist()
        chosen[: source + 1, : target + 1] = index
    return chosen


def padded_work(counts: Counts, shapes: npt.NDArray[np.int64], work: PairFlops) -> float:
    """Returns the work of all pairs, each padded to the cheapest of ``shapes`` (K, 2) that holds it."""
    prices = work.of(shapes[:, 0], shapes[:, 1]).astype(np.float64)
    chosen = choose(counts.shape, shapes, work)
    assert (chosen[counts > 0] >= 0).all()
    return float((counts * prices[chosen]).sum())
