"""Files with a line for each pair of a corpus: source factors, word alignments in Pharaoh format, and weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from econmt.data.text.corpus import Corpus, count_lines, different_lengths, read_lines
from econmt.data.text.source_factors import word_numbers
from econmt.data.text.vocabulary import Vocabulary
from econmt.errors import InputError

Link = tuple[int, int]
"""Indices of a source word and a target word, from 0."""

WEIGHT_UNIT = 1e-6
"""Weights are whole multiples of this number, so that all tensors of a batch are integers."""
_LARGEST_WEIGHT = 4000
_LINK = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]{1,3})?|[0-9]+\.")


class GuideFile:
    """File with a line for each pair of a corpus, read along with the corpus."""

    def __init__(self, path: Path, source: Path) -> None:
        self.path, self._source = path, source
        self._lines = read_lines(path)
        self._read = 0

    def take(self, count: int) -> list[str]:
        """Returns the lines of the next ``count`` pairs; raises InputError if there are fewer."""
        lines = list(islice(self._lines, count))
        self._read += len(lines)
        if len(lines) < count:
            pairs = count_lines(self._source) or self._read + count - len(lines)
            raise different_lengths(self.path, self._read, self._source, pairs)
        return lines

    def finish(self) -> None:
        """Raises InputError if there are more lines than pairs."""
        more = sum(1 for _ in self._lines)
        if more:
            raise different_lengths(self.path, self._read + more, self._source, self._read)


def with_factors(pairs: Iterator[tuple[str, str]], corpus: Corpus) -> Iterator[tuple[str, ...]]:
    """Yields the pairs of a corpus as tuples of source, target and one line of factors from the file of each stream."""
    streams = [GuideFile(path, corpus.source) for path in corpus.factors]
    for pair in pairs:
        yield *pair, *(stream.take(1)[0] for stream in streams)
    for stream in streams:
        stream.finish()


def parse_links(line: str, where: str, source_words: int, target_words: int) -> list[Link]:
    """Parses a line in Pharaoh format, "0-0 1-2", into links in order, each once.

    Raises:
        InputError: An entry is not two numbers, or a sentence has fewer words; the message begins with ``where``.
    """
    links = set()
    for entry in line.split():
        match = _LINK.fullmatch(entry)
        if match is None:
            raise InputError(f"{where}: expected pairs of words as 0-0 1-2, found {entry[:40]!r}")
        link = int(match[1]), int(match[2])
        for number, words, side in zip(link, (source_words, target_words), ("source", "target"), strict=True):
            if number >= words:
                raise InputError(
                    f"{where}: {entry} names {side} word {number}, but the sentence has {words} words between spaces, "
                    "counted from 0; align the same text"
                )
        links.add(link)
    return sorted(links)


def parse_weight(line: str, where: str) -> int:
    """Parses the weight of a pair; returns it in units of :data:`WEIGHT_UNIT`."""
    text = line.strip()
    if not _NUMBER.fullmatch(text) or not float(text) <= _LARGEST_WEIGHT:
        raise InputError(f"{where}: expected a weight from 0 to {_LARGEST_WEIGHT}, found {text[:40]!r}")
    return round(float(text) / WEIGHT_UNIT)


def check_words(ids: Sequence[int], vocabulary: Vocabulary, words: int, where: str) -> None:
    """Raises InputError if the words of tokens, by which links are assigned to them, are not those of the text."""
    numbers = word_numbers(vocabulary.tokens(ids), vocabulary)
    if numbers and numbers[-1] + 1 != words:
        raise InputError(
            f"{where}: its tokens have {numbers[-1] + 1} words and its text {words}, so that the alignment cannot be "
            "assigned; remove unusual spaces from it"
        )
