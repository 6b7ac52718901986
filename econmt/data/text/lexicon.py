"""Which target words may translate a source word: IBM model 1, learnt from a parallel text.

Model 1 (Brown et al., 1993, "The mathematics of statistical machine translation") says of each target word of a pair
that one of the source's words, or none, has given rise to it, each as likely as the other before it is seen; EM finds
the probabilities t(target | source). Sockeye's and Marian's shortlists are made of them too.

Shapes: S, T source and target vocabulary, K words that are kept of each source word, L links, that is, pairs of a
source and a target position of the same sentence pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.data.text.subwords import BOS, PAD

NOTHING = BOS
"""The row of a lexicon with the words that no word of the source gives rise to."""

_LINKS = 1 << 22
"""Links that are worked on at a time."""

_Ids = npt.NDArray[np.int64]


class _Side(NamedTuple):
    """The ids of all sentences one after the other, and where each begins and ends (N + 1,)."""

    ids: _Ids
    ends: _Ids


class _Links(NamedTuple):
    """Links of some pairs: their words (L,) as numbers source * T + target, by target position; how many each has."""

    words: _Ids
    counts: _Ids


def learn_lexicon(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    sizes: tuple[int, int],
    keep: int,
    iterations: int = 5,
) -> npt.NDArray[np.int32]:
    """The most probable translations of every source word.

    Args:
        pairs: ids of source and target. sizes: S and T. keep: K. iterations: of EM.

    Returns:
        (S, K), the most probable first, PAD where there are no more; row ``NOTHING`` has what stands for no word.
    """
    source = _flat([[NOTHING, *pair[0]] for pair in pairs])
    target = _flat([pair[1] for pair in pairs])
    known: _Ids = np.zeros(0, np.int64)
    for links in _links(source, target, sizes[1]):
        known = np.union1d(known, links.words)
    owners = known // sizes[1]
    probabilities = np.ones(len(known))
    for _ in range(iterations):
        expected = np.zeros(len(known))
        for links in _links(source, target, sizes[1]):
            places = np.searchsorted(known, links.words)
            values = probabilities[places]
            begins = np.cumsum(links.counts) - links.counts
            values /= np.repeat(np.add.reduceat(values, begins), links.counts)
            expected += np.bincount(places, values, len(known))
        totals = np.bincount(owners, expected, sizes[0])
        probabilities = expected / np.maximum(totals[owners], np.finfo(np.float64).tiny)
    return _best(owners, known % sizes[1], probabilities, sizes[0], keep)


def _flat(sentences: Sequence[Sequence[int]]) -> _Side:
    ends = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
    ids = np.fromiter((word for sentence in sentences for word in sentence), np.int64, int(ends[-1]))
    return _Side(ids, ends)


def _links(source: _Side, target: _Side, width: int) -> Iterator[_Links]:
    """The links of all pairs, some pairs at a time; ``width``: T."""
    lengths: Any = np.diff(source.ends)
    before = np.cumsum(np.concatenate([[0], lengths * np.diff(target.ends)]))
    first, count = 0, len(lengths)
    while first < count:
        last = max(first + 1, int(np.searchsorted(before, before[first] + _LINKS, "right")) - 1)
        sizes = np.diff(target.ends[first : last + 1])
        owners = np.repeat(np.arange(first, last), sizes)
        counts = lengths[owners]
        begins = np.cumsum(counts) - counts
        within = np.arange(counts.sum()) - np.repeat(begins, counts)
        words = source.ids[np.repeat(source.ends[owners], counts) + within]
        targets = target.ids[target.ends[first] : target.ends[last]]
        if len(targets):
            yield _Links(words * width + np.repeat(targets, counts), counts)
        first = last


def _best(
    owners: _Ids, words: _Ids, probabilities: npt.NDArray[np.float64], size: int, keep: int
) -> npt.NDArray[np.int32]:
    """The ``keep`` most probable words of each owner, equal ones by their ids."""
    order = np.lexsort((words, -probabilities, owners))
    owners, words = owners[order], words[order]
    begins = np.searchsorted(owners, np.arange(size))
    ranks = np.arange(len(owners)) - begins[owners]
    kept = ranks < keep
    table = np.full((size, keep), PAD, np.int32)
    table[owners[kept], ranks[kept]] = words[kept]
    return table
