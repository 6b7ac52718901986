"""The runtime's beam search against all translations there are, with a model of a few words that is a table."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

from econmt_runtime import library
from econmt_runtime.library import Floats, Ids
from econmt_runtime.model import OutputLayer
from econmt_runtime.search import Options, beam_search, output_limits
from econmt_runtime.text import BOS, EOS

WORDS = 6  # four special ones, of which <unk> can be translated, and two
TRANSLATED = [1, 4, 5]
Scored = tuple[float, tuple[int, ...]]


class TableState(NamedTuple):
    """Sentence and last words of each row."""

    owners: Ids
    rows: Ids

    def select(self, rows: Ids, owners: Ids) -> TableState:
        return TableState(owners, self.rows[rows])


class TableModel:
    """Model whose logits depend on the sentence, the last word, and the position."""

    def __init__(self, sentences: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.logits = draw.normal(size=(sentences, 9, WORDS, WORDS)).astype(np.float32) * 2

    def encode(self, source: Ids, padding: object) -> tuple[None, TableState]:
        return None, TableState(np.arange(len(source)), np.zeros(len(source), np.int64))

    def output_layer(self, allowed: object) -> OutputLayer:
        return OutputLayer(lambda left, _: left, WORDS, None)

    def step(self, words: Ids, sources: None, state: TableState, output: object) -> tuple[Floats, TableState]:
        logits = self.logits[state.owners, state.rows, words]
        return np.ascontiguousarray(logits), TableState(state.owners, state.rows + 1)

    def log_probability(self, sentence: int, ids: tuple[int, ...]) -> float:
        """Log-probability of a translation with its end."""
        total = 0.0
        for position, (word, following) in enumerate(zip((BOS, *ids), (*ids, EOS), strict=True)):
            row = self.logits[sentence, position, word].astype(np.float64)
            total += row[following] - math.log(np.exp(row).sum())
        return total


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    library.start()


def search(model: TableModel, limits: list[int], options: Options) -> list[Any]:
    source = np.zeros((len(limits), 2), np.int64)
    return beam_search(model, source, source > 0, np.array(limits), options, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.5])
@pytest.mark.parametrize("nbest", [1, 2, 7, 40])
def test_a_beam_that_holds_all_translations_finds_the_best(nbest: int, alpha: float) -> None:
    limits = [3, 1, 2, 3]
    for seed in range(6):
        model, options = TableModel(len(limits), seed), Options(64, alpha, 1.5, 1.0, nbest)
        for sentence, found in enumerate(search(model, limits, options)):
            lengths = range(limits[sentence] + 1)
            every = [ids for length in lengths for ids in product(TRANSLATED, repeat=length)]
            likely = {ids: model.log_probability(sentence, ids) for ids in every}
            scores = {ids: likely[ids] / ((1.5 + len(ids) + 1) / 2.5) ** alpha for ids in every}
            best = sorted(every, key=lambda ids: -scores[ids])[:nbest]
            assert [tuple(each.ids) for each in found] == best
            assert [each.score for each in found] == pytest.approx([scores[ids] for ids in best], abs=1e-5)
            log_probabilities = pytest.approx([likely[ids] for ids in best], abs=1e-5)
            assert [each.log_probability for each in found] == log_probabilities


def naive(model: TableModel, sentence: int, limit: int, options: Options) -> list[Scored]:
    """Beam search by its definition: K continuations a step, of which finished ones give up their place."""
    rows: list[Scored] = [(0.0, ())]
    ended: list[Scored] = []
    free = options.beam_size
    for position in range(1, limit + 2):
        grown: list[tuple[float, tuple[int, ...], int]] = []
        for total, ids in rows:
            row = model.logits[sentence, position - 1, (BOS, *ids)[-1]].astype(np.float64)
            row = row - math.log(np.exp(row).sum())
            words = [EOS] if position > limit else sorted([*TRANSLATED, EOS])
            grown += [(total + row[word], ids, word) for word in words]
        grown = sorted(grown, key=lambda each: -each[0])[:free]
        ends = [(total / float(options.penalty(position)), ids) for total, ids, word in grown if word == EOS]
        ended, free = ended + ends, free - len(ends)
        rows = [(total, (*ids, word)) for total, ids, word in grown if word != EOS]
    return sorted(ended, key=lambda each: -each[0])[: options.nbest_size]


@pytest.mark.parametrize("beam", [1, 2, 3, 5])
def test_small_beams_are_those_of_the_definition(beam: int) -> None:
    limits = [6, 1, 4]
    for seed, nbest in product(range(12), {1, 2, beam} - {4}):
        if nbest > beam:
            continue
        model, options = TableModel(len(limits), seed), Options(beam, 1.0, 0.5, 1.0, nbest)
        for sentence, found in enumerate(search(model, limits, options)):
            expected = naive(model, sentence, limits[sentence], options)
            assert [tuple(each.ids) for each in found] == [ids for _, ids in expected]
            assert [each.score for each in found] == pytest.approx([score for score, _ in expected], abs=1e-5)


def test_ties_limits_and_sentences_without_finite_probability() -> None:
    model, options = TableModel(1, 1), Options(20, 0.0, 1.0, 1.0, 20)
    model.logits[:] = 0.0
    found = search(model, [3], options)[0]
    assert [(each.ids) for each in found] == [list(ids) for _, ids in naive(model, 0, 3, options)]
    model = TableModel(2, 1)
    model.logits[0] = math.nan
    found = search(model, [2, 2], Options(3, 1.0, 0.0, 1.0, 2))
    assert found[0] == []
    assert len(found[1]) == 2
    lengths = np.array([1, 3, 10, 50])
    # floor(1.5 n) + 10, but at most the larger of n + 10 and 1.5 times 20, and 10
    assert output_limits(lengths, 1.5, 20).tolist() == [11, 14, 25, 60]
    assert output_limits(lengths, 3.0, 20).tolist() == [13, 19, 40, 70]
    assert output_limits(lengths, 0.0, 20).tolist() == [10, 10, 10, 10]
