"""Beam search, as econmt's own: the same places, the same end, the same scores.

B sentences, K places of each, R rows still growing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt_runtime import library
from econmt_runtime.library import Ids
from econmt_runtime.model import RuntimeModel
from econmt_runtime.text import BOS, EOS, PAD

_Totals = npt.NDArray[np.float64]
_Ended = tuple[float, float, int, int]
"""Score, log-probability, position and row of what has ended."""

_EXTRA = 10
"""Tokens that a translation may have beyond what its source's length allows."""


class Options(NamedTuple):
    """How to search; see a recipe's ``decoding``."""

    beam_size: int
    length_penalty_alpha: float
    length_penalty_beta: float
    max_output_factor: float
    nbest_size: int = 1

    def penalty(self, length: float | Ids) -> _Totals:
        """((beta + length) / (beta + 1)) ** alpha."""
        base = (self.length_penalty_beta + np.asarray(length, np.float64)) / (self.length_penalty_beta + 1.0)
        return np.asarray(base**self.length_penalty_alpha, np.float64)


class RuntimeHypothesis(NamedTuple):
    """A translation: its ids without EOS, its score, and its log-probability with EOS."""

    ids: list[int]
    score: float
    log_probability: float


def output_limits(lengths: Ids, factor: float, longest: int) -> Ids:
    """Most tokens before EOS, by source tokens (B,), of a model trained on ``longest`` at most."""
    limits: Ids = np.floor(lengths * factor).astype(np.int64) + _EXTRA
    return np.minimum(limits, np.maximum(lengths + _EXTRA, int(longest * factor) + _EXTRA))


def beam_search(
    model: RuntimeModel,
    source: Ids,
    padding: npt.NDArray[np.bool_],
    limits: Ids,
    options: Options,
    allowed: npt.NDArray[np.bool_] | None,
) -> list[list[RuntimeHypothesis]]:
    """The n best translations of each sentence, best first; none where the model gives no finite probability to any.

    Args:
        source: (B, S) ids with EOS. padding: (B, S). limits: (B,). allowed: (B, V) words of each, or None: all.
    """
    count, beam = len(source), options.beam_size
    sources, state = model.encode(source, padding)
    output = model.output_layer(allowed)
    width = min(beam, output.product.outputs)
    skipped = np.array([PAD, BOS])
    tokens, owners, totals = np.full(count, BOS), np.arange(count), np.zeros(count)
    places = np.zeros(count, np.int64)
    free, best = np.full(count, beam), np.full((count, options.nbest_size), -np.inf)
    most = options.penalty(limits + 1)
    found: list[list[_Ended]] = [[] for _ in range(count)]
    trace: list[tuple[Ids, Ids]] = []
    position = 0
    while len(owners):
        position += 1
        words = tokens if output.words is None else output.words[tokens]
        logits, state = model.step(words, sources, state, output)
        values, numbers, end = library.best_words(logits, width, output.barred, owners, skipped)
        last = position > limits[owners]
        if last.any():
            values[last], numbers[last, 0] = -np.inf, EOS
            values[last, 0] = end[last]
        grid = np.full((count, beam, width), -np.inf)
        grid[owners, places] = totals[:, None] + values
        rows = np.zeros((count, beam), np.int64)
        rows[owners, places] = np.arange(len(owners))
        flat = grid.reshape(count, -1)
        order = np.argsort(-flat, axis=1, kind="stable")[:, :beam]
        now = np.take_along_axis(flat, order, 1)
        parents = np.take_along_axis(rows, order // width, 1)
        chosen = numbers[parents, order % width]
        kept = (np.arange(beam) < free[:, None]) & (now > -np.inf)
        ends = kept & (chosen == EOS)
        grows = kept & ~ends
        penalty = float(options.penalty(position))
        for sentence, column in zip(*(part.tolist() for part in ends.nonzero()), strict=True):
            total = float(now[sentence, column])
            found[sentence].append((total / penalty, total, position, int(parents[sentence, column])))
            scores = sorted([*best[sentence].tolist(), total / penalty], reverse=True)
            best[sentence] = scores[: options.nbest_size]
        free = free - ends.sum(1)
        reach = np.where(grows, now, -np.inf).max(1) / most
        growing = grows & (best[:, -1] < reach)[:, None]
        owners, columns = (np.ascontiguousarray(part) for part in growing.nonzero())  # columns of one array
        tokens, parents, totals = (part[owners, columns] for part in (chosen, parents, now))
        places = (growing.cumsum(1) - 1)[owners, columns]
        trace.append((tokens, parents))
        state = state.select(parents, owners)
    return [
        [
            _read(entry, trace, output.words)
            for entry in sorted(entries, key=lambda entry: -entry[0])[: options.nbest_size]
        ]
        for entries in found
    ]


def _read(entry: _Ended, trace: list[tuple[Ids, Ids]], words: Ids | None) -> RuntimeHypothesis:
    """The translation that ended at a position, from the row of its last step."""
    score, log_probability, position, row = entry
    ids = []
    for tokens, parents in reversed(trace[: position - 1]):
        ids.append(int(tokens[row]))
        row = int(parents[row])
    ids.reverse()
    return RuntimeHypothesis(ids if words is None else words[ids].tolist(), score, log_probability)
