"""Measures language filters and noise of training text.

    python -m scripts.bench filters multi30k/train tatoeba-en-de/train --foreign news.vi.gz

Prints the shares of lines that are taken for a foreign language at each certainty, and batches a second with each kind
of noise.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from econmt.bench.rows import Row
from econmt.config.recipe import Data, Recipe, Training
from econmt.data.batching.batches import training_batches
from econmt.data.batching.store import prepare
from econmt.data.text.corpus import find_corpus, read_lines, read_pairs, search_path
from econmt.data.text.filters import language_classifier
from scripts.bench.frame import Bench

CERTAINTIES = (0.2, 0.3, 0.5, 0.7, 0.9)
PAIRS = 5000
NOISES = {
    "none": {},
    "typos 0.1": {"typos": 0.1},
    "upper 0.05": {"upper": 0.05},
    "all five, 0.05 each": dict.fromkeys(("upper", "title", "typos", "emoji", "markup"), 0.05),
}


class Classified(NamedTuple):
    """Languages that the filter finds, each with its probability, and the lines that it classifies a second.

    Attributes:
        english, german: Languages of both sides of some pairs.
        foreign: Languages of lines in another language.
        rate: Lines a second.
    """

    english: list[tuple[str, float]]
    german: list[tuple[str, float]]
    foreign: list[tuple[str, float]]
    rate: float

    @classmethod
    def of(cls, prefix: str, foreign: Iterable[str], search: Sequence[Path]) -> Classified:
        """Classifies some pairs of a text, and the foreign lines."""
        pairs = list(read_pairs(find_corpus(prefix, "en", "de", search, progress=False)))
        drawn = random.Random(1).sample(pairs, min(PAIRS, len(pairs)))
        classify = language_classifier(("en", "de"))
        start = time.perf_counter()
        english, german = ([classify(line) for line in side] for side in zip(*drawn, strict=True))
        rate = 2 * len(drawn) / (time.perf_counter() - start)
        return cls(english, german, [classify(line) for line in islice(foreign, PAIRS)], rate)

    def shares(self, certainty: float) -> tuple[float, float, float]:
        """Returns shares at the least probability at which the filter believes what it finds.

        Returns:
            Shares of correct pairs that are left out, and of German and of foreign lines that are found when given as
            English.
        """
        wrong, swapped, foreign = (
            [name != wanted and probability >= certainty for name, probability in lines]
            for lines, wanted in ((self.english, "en"), (self.german, "en"), (self.foreign, "en"))
        )
        doubted = [name != "de" and probability >= certainty for name, probability in self.german]
        left_out = [one or other for one, other in zip(wrong, doubted, strict=True)]
        return (
            sum(left_out) / len(left_out), sum(swapped) / len(swapped), sum(foreign) / max(1, len(foreign)),
        )  # fmt: skip


def epochs_with_noise(prefix: str, search: Sequence[Path]) -> Iterator[tuple[str, float, float, float]]:
    """Reads an epoch of a text in batches of 64, without training, with each kind of noise.

    Yields:
        Name of the noise, padded target positions for each real one less one, batches a second, and seconds to plan the
        epoch.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, section in NOISES.items():
            data = {"source": "en", "target": "de", "train": [prefix], "valid": prefix, "noise": section}
            recipe = Recipe(
                name="x", output="x", data=Data.model_validate(data), training=Training(max_updates=1)
            )
            prepared = prepare(recipe, Path(folder) / "store", search, show_progress=False)
            start = time.perf_counter()
            stream = training_batches(recipe, prepared)
            planned = time.perf_counter() - start
            count = stream.batches_per_epoch
            padded = real = 0
            for batch in islice(stream, count):
                trimmed = batch.trimmed()
                padded += trimmed.target_output.numel()
                real += trimmed.target_tokens
            rate = count / (time.perf_counter() - start - planned)
            yield name, padded / real - 1, rate, planned


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__)
    bench.add_argument("prefixes", nargs="+", help="texts in English and German, named as in data.train")
    bench.add_argument("--foreign", type=Path, help="text in another language")
    given = bench.begin(words)
    search = search_path(None, None)

    def shares() -> Iterator[Row]:
        for prefix in given.prefixes:
            foreign = [] if given.foreign is None else read_lines(given.foreign)
            classified = Classified.of(prefix, foreign, search)
            for certainty in CERTAINTIES:
                row: Row = {"text": prefix, "lines/s": round(classified.rate), "certainty": certainty}
                names = "correct pairs left out", "German found", "other language found"
                percents = (f"{share:.2%}" for share in classified.shares(certainty))
                yield row | dict(zip(names, percents, strict=True))

    bench.report(shares(), "language filter")
    noises: Iterator[Row] = (
        {"noise": name, "padding": f"{padding:.2%}", "batches/s": round(rate), "s to plan": f"{planned:.2f}"}
        for name, padding, rate, planned in epochs_with_noise(given.prefixes[0], search)
    )
    bench.report(noises, f"{given.prefixes[0]}: one epoch in batches of 64")
