"""Validation, test and training text of documents, for the scripts that make text: make-laws and make-docs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

ROWS_OF_DOCUMENT = 100
"""Rows at most that a document gives to the validation or test text; the rest of it is not used."""
WORDS_HELD_OUT = 4
"""English words at least of a held-out row: shorter ones, such as headings, are the same in many documents."""
MAX_RATIO = 3.0
"""Characters of one side at most, relative to the other side."""
FREE_CHARACTERS = 10
"""Characters added to both sides before they are compared: short texts differ more."""

Row = tuple[str, ...]
"""Texts that say the same, one in each language, English first; empty for a language that lacks it."""


def is_similar(pair: Row) -> bool:
    """Returns True if neither side is more than ``MAX_RATIO`` times as long as the other."""
    short, long = sorted(len(side) + FREE_CHARACTERS for side in pair)
    return long <= MAX_RATIO * short


def digest(text: str) -> int:
    """Returns a hash of 64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def shuffled(names: Iterable[str]) -> list[str]:
    """Returns names of documents in the order of a hash."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


class Splits:
    """Text files of the three splits, filled one after the other: validation, test, training.

    Args:
        folder: folder of the files, SPLIT.LANGUAGE.
        languages: languages of a row's texts.
        size: number of rows of the validation and of the test text.
        why_not: returns why a row is not used; an empty text if it is.
        most: rows at most that a document gives to the validation or test text.
    """

    def __init__(
        self,
        folder: Path,
        languages: Sequence[str],
        size: int,
        why_not: Callable[[Row], str] = lambda _: "",
        most: int = ROWS_OF_DOCUMENT,
    ) -> None:
        self.counts = dict.fromkeys(("valid", "test", "train"), 0)
        self.words = [0] * len(languages)
        """Words of the training text by language, as spaces divide it."""
        self.left_out: Counter[str] = Counter()
        """Rows that are not in the training text, by reason."""
        self._folder, self._languages, self._size = folder, languages, size
        self._why_not, self._most = why_not, most
        self._held_out: set[int] = set()

    def __enter__(self) -> Splits:  # noqa: PYI034
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self._files = {
                (split, language): stack.enter_context(
                    (self._folder / f"{split}.{language}").open("w", encoding="utf-8", newline="\n")
                )
                for split in self.counts
                for language in self._languages
            }
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, rows: Iterable[Row]) -> None:
        """Adds the rows of a document to the split that is being filled."""
        split = next((name for name in ("valid", "test") if self.counts[name] < self._size), "train")
        if split == "train":
            for row in rows:
                self._train(row)
            return
        missing = self._size - self.counts[split]
        for row in self._evenly(row for row in rows if not self._why_not(row))[:missing]:
            self._held_out.update(map(digest, row))
            self._write(split, row)

    def _evenly(self, rows: Iterable[Row]) -> list[Row]:
        """Returns what a document gives to the validation or test text, evenly from all of it.

        These are rows with different texts in all languages, none of which was held out before, and not short.
        """
        long = (row for row in rows if all(row) and len(row[0].split()) >= WORDS_HELD_OUT)
        by_source = {row[0]: row for row in long if len({*row}) == len(row) and not self._is_held_out(row)}
        return list(by_source.values())[:: max(1, -(-len(by_source) // self._most))]

    def _is_held_out(self, row: Row) -> bool:
        return not self._held_out.isdisjoint(map(digest, filter(None, row)))

    def _train(self, row: Row) -> None:
        reason = self._why_not(row)
        if not reason and self._is_held_out(row):
            reason = "with a side that is in the validation or test text"
        if reason:
            self.left_out[reason] += 1
            return
        self.words = [words + len(side.split()) for words, side in zip(self.words, row, strict=True)]
        self._write("train", row)

    def _write(self, split: str, row: Row) -> None:
        self.counts[split] += 1
        for language, side in zip(self._languages, row, strict=True):
            self._files[split, language].write(side + "\n")
