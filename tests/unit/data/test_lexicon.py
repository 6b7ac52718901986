"""IBM model 1 against its definition."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from econmt.data.text import lexicon
from econmt.data.text.lexicon import EMPTY_WORD, learn_lexicon
from econmt.data.text.vocabulary import PAD

PAIRS = [([5, 6], [7, 8]), ([5], [7]), ([6, 4, 6], [8, 9, 8, 4]), ([4], []), ([], [9]), ([5, 4], [7, 9])]
SIZES = 7, 10


def naive(iterations: int) -> dict[int, dict[int, float]]:
    """t(target | source), link by link."""
    table: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(lambda: 1.0))
    for _ in range(iterations):
        counts: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for source, target in PAIRS:
            words = [EMPTY_WORD, *source]
            for word in target:
                total = sum(table[other][word] for other in words)
                for other in words:
                    counts[other][word] += table[other][word] / total
        for source, row in counts.items():
            table[source] = defaultdict(float, {word: n / sum(row.values()) for word, n in row.items()})
    return table


@pytest.mark.parametrize("links", [1, 5, 1 << 22])
def test_the_most_probable_come_first(links: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexicon, "_LINKS", links)
    found = learn_lexicon(PAIRS, SIZES, keep=3, iterations=4)
    assert found.shape == (7, 3)
    expected = naive(4)
    for source in range(7):
        row = expected.get(source, {})
        ranked = sorted(row, key=lambda word: (-row[word], word))[:3]
        assert found[source].tolist() == [*ranked, *[PAD] * (3 - len(ranked))]


def test_a_dictionary_is_found() -> None:
    draws = np.random.default_rng(1)
    sources = [draws.permutation(np.arange(4, 24))[:6].tolist() for _ in range(400)]
    table = learn_lexicon([(ids, [word + 20 for word in ids[::-1]]) for ids in sources], (24, 44), 5)
    assert table[4:, 0].tolist() == list(range(24, 44))
    assert not table[3].any()
