"""The few shapes to which sentence pairs are padded, derived from the lengths of a text.

A shape (S, T) holds the pairs of at most S source and T target positions, and each of them costs work(S, T). Given
how many shapes there may be, which ones cost least? Shapes that lie within each other, R_1 in R_2 in ... in R_k, are
found exactly: with C(R) the number of pairs that R holds,

    cost_j(R) = min over R' in R of  cost_{j-1}(R') + (C(R) - C(R')) work(R),        cost_1(R) = C(R) work(R)

and cost_k of the shape that holds all pairs is the least possible. The two sides of a translation are about as long
as each other, so that shapes which do not lie within each other have little to add: a search over all sets of shapes
found none better on any text that was tried. Where they do, because the two lengths have nothing to
do with each other, a grid of fixed buckets that needs no more shapes may be better and is taken instead.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.data.batching.pair_flops import PairFlops
from econmt.data.batching.token_store import IntArray

_MOST_LENGTHS = 100
"""Different lengths of a side that are looked at: of more, half of them evenly by pairs and half evenly by length."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
"""(S + 1, T + 1): how many pairs have s source and t target positions, ``</s>`` counted."""


class Derived(NamedTuple):
    """A rule for buckets: at most ``most`` shapes, those that pad the least work."""

    most: int
    work: PairFlops


def derive_shapes(counts: Counts, rule: Derived) -> npt.NDArray[np.int64]:
    """The shapes with which a text costs least.

    Args:
        counts: how many pairs each length has.
        rule: how many shapes there may be, and what a position costs.

    Returns:
        (K, 2), K <= ``rule.most``: source and target positions, by rising target, then source positions. Every pair
        fits the last one.
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
    """(K, 2): the fixed buckets of a width that hold a pair, by rising target, then source positions."""
    cells = np.unique(-(-np.argwhere(counts.T) // width) * width, axis=0)
    shapes: Ints = np.ascontiguousarray(cells[:, ::-1])
    return shapes


def nested_shapes(counts: Counts, rule: Derived) -> npt.NDArray[np.int64]:
    """(K, 2): the best shapes of those that lie within each other, smallest first; see the module's text."""
    sources, targets = _candidates(counts.sum(axis=1)), _candidates(counts.sum(axis=0))
    held = counts.cumsum(axis=0).cumsum(axis=1)[np.ix_(sources, targets)].astype(np.float64)
    work = rule.work.of(sources[:, None], targets[None, :]).astype(np.float64)
    rows, columns = held.shape
    # A smaller shape would hold the same pairs if none had the shape's own length on a side.
    same_above = np.zeros_like(held, dtype=bool)
    same_above[1:] |= held[1:] == held[:-1]
    same_above[:, 1:] |= held[:, 1:] == held[:, :-1]
    same_above[-1, -1] = False
    costs = np.full((rule.most, rows, columns), np.inf)
    before = np.zeros((rule.most, rows, columns), dtype=np.int64)
    for row in range(rows):
        for column in range(columns):
            if same_above[row, column]:
                continue
            price, everything = work[row, column], held[row, column] * work[row, column]
            inner = costs[:-1, : row + 1, : column + 1] - held[: row + 1, : column + 1] * price
            flat = inner.reshape(rule.most - 1, (row + 1) * (column + 1))
            flat[:, -1] = np.inf  # the shape itself
            places = flat.argmin(axis=1)
            found = everything + np.append(0.0, flat[np.arange(len(flat)), places])
            costs[:, row, column] = np.minimum.accumulate(found)
            # Where one more shape is of no use, the step back stays at this one.
            origins = np.append(0, places // (column + 1) * columns + places % (column + 1))
            here = row * columns + column
            before[:, row, column] = np.where(costs[:, row, column] < found, here, origins)
    return _trace(costs, before, sources, targets)


def _trace(costs: Floats, before: Ints, sources: IntArray, targets: IntArray) -> Ints:
    """The shapes that the table of costs chose, smallest first."""
    row, column = len(sources) - 1, len(targets) - 1
    found: list[tuple[int, int]] = []
    for number in range(len(costs) - 1, -1, -1):
        shape = int(sources[row]), int(targets[column])
        if not found or found[-1] != shape:
            found.append(shape)
        row, column = divmod(int(before[number, row, column]), len(targets))
    return np.array(found[::-1], dtype=np.int64)


def _candidates(pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The lengths at which shapes may end: all that occur or, of many, some."""
    lengths = np.flatnonzero(pairs)
    if len(lengths) <= _MOST_LENGTHS:
        return lengths
    half = _MOST_LENGTHS // 2
    shares = np.arange(1, half + 1) * (pairs.sum() / half)
    even_in_pairs = np.searchsorted(pairs.cumsum(), shares * (1 - 1e-12))
    even_in_length = lengths[np.linspace(0, len(lengths) - 1, half).round().astype(int)]
    return np.unique(np.concatenate([np.minimum(even_in_pairs, lengths[-1]), even_in_length]))


def choose(shape: tuple[int, int], shapes: npt.NDArray[np.int64], work: PairFlops) -> npt.NDArray[np.int32]:
    """For every pair of lengths the shape that holds it with the least work.

    Args:
        shape: (S + 1, T + 1), lengths looked at on both sides.
        shapes: (K, 2).
        work: of a pair.

    Returns:
        (S + 1, T + 1): a row of ``shapes``; -1 where none holds the pair.
    """
    found = np.full(shape, -1, dtype=np.int32)
    prices = work.of(shapes[:, 0], shapes[:, 1])
    for index in np.argsort(-prices, kind="stable").tolist():
        source, target = shapes[index].tolist()
        found[: source + 1, : target + 1] = index
    return found


def padded_work(counts: Counts, shapes: npt.NDArray[np.int64], work: PairFlops) -> float:
    """Work of all pairs, each padded to the cheapest of ``shapes`` (K, 2) that holds it."""
    prices = work.of(shapes[:, 0], shapes[:, 1]).astype(np.float64)
    chosen = choose(counts.shape, shapes, work)
    assert (chosen[counts > 0] >= 0).all()
    return float((counts * prices[chosen]).sum())
