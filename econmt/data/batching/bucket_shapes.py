"""Bucket shapes: the few shapes to which sentence pairs are padded, derived from the lengths of a text.

A shape (S, T) holds pairs of at most S source and T target positions; each of them costs work(S, T). The best nested
shapes, R_1 in R_2 in ... in R_k, are found exactly by dynamic programming: with C(R) the number of pairs that R holds,

    cost_j(R) = min over R' in R of  cost_{j-1}(R') + (C(R) - C(R')) work(R),        cost_1(R) = C(R) work(R)

and cost_k of the shape that holds all pairs is the minimum. The two sides of a translation have similar lengths, so
that shapes which are not nested hardly help: an exhaustive search found none better on any text tried. For texts whose
lengths are unrelated, a grid of fixed buckets with no more shapes is taken instead if it costs less.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.data.batching.pair_flops import PairFlops
from econmt.data.batching.token_store import IntArray

_MOST_LENGTHS = 100
"""Maximum number of candidate lengths per side; of more, half are spaced evenly by pairs and half by length."""

Ints = npt.NDArray[np.int64]
Counts = Ints
"""Number of pairs with s source and t target positions including ``</s>``, (S + 1, T + 1)."""


class Derived(NamedTuple):
    """Bucket rule: at most ``most`` shapes, those with the least padded work."""

    most: int
    work: PairFlops


def derive_shapes(counts: Counts, rule: Derived) -> npt.NDArray[np.int64]:
    """Returns the shapes with the least padded work for a text.

    Returns:
        Source and target positions of K <= ``rule.most`` shapes, (K, 2), sorted by target, then source positions. The
        last one holds all pairs.
    """
    assert counts.any()
    work = rule.work.scaled()
    best = nested_shapes(counts, Derived(rule.most, work))
    least = padded_work(counts, best, work)
    for width in range(1, max(counts.shape)):
        grid = grid_shapes(counts, width)
        if len(grid) <= rule.most:
            cost = padded_work(counts, grid, work)
            best, least = (grid, cost) if cost < least else (best, least)
    return best


def grid_shapes(counts: Counts, width: int) -> npt.NDArray[np.int64]:
    """Returns the non-empty fixed buckets of a width, (K, 2), sorted by target, then source positions."""
    cells = np.unique(-(-np.argwhere(counts.T) // width) * width, axis=0)
    shapes: Ints = np.ascontiguousarray(cells[:, ::-1])
    return shapes


def nested_shapes(counts: Counts, rule: Derived) -> npt.NDArray[np.int64]:
    """Returns the best nested shapes, (K, 2), smallest first; see the module docstring."""
    sources, targets = _candidates(counts.sum(axis=1)), _candidates(counts.sum(axis=0))
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
    return _trace(rule.most, before, sources, targets)


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


def _candidates(pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the candidate lengths of shapes: all that occur, or a selection if they are many."""
    lengths = np.flatnonzero(pairs)
    if len(lengths) <= _MOST_LENGTHS:
        return lengths
    half = _MOST_LENGTHS // 2
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
