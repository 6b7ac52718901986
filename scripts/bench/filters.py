"""Measures language filters and noise of training text.

    python -m scripts.bench filters multi30k/train tatoeba-en-de/train --foreign news.vi.gz

Prints the lines that are taken for a foreign language at each certainty, and batches a second with each kind of noise.
"""

from __future__ import annotations

import random
import tempfile
import time
from itertools import islice
from pathlib import Path

from econmt.config.recipe import Data, Recipe, Training
from econmt.data.batching.batches import training_batches
from econmt.data.batching.store import prepare
from econmt.data.text.corpus import find_corpus, read_lines, read_pairs
from econmt.data.text.filters import language_classifier
from scripts.bench.arguments import parser_of

CERTAINTIES = (0.2, 0.3, 0.5, 0.7, 0.9)
PAIRS = 5000
NOISES = {
    "none": {},
    "typos 0.1": {"typos": 0.1},
    "upper 0.05": {"upper": 0.05},
    "all five, 0.05 each": dict.fromkeys(("upper", "title", "typos", "emoji", "markup"), 0.05),
}


def certainties(prefix: str, foreign: Path | None) -> None:
    """Prints the shares of true and of foreign source lines that are taken for another language."""
    pairs = list(read_pairs(find_corpus(prefix, "en", "de", [Path.cwd()], progress=False)))
    sample = random.Random(1).sample(pairs, min(PAIRS, len(pairs)))
    classify = language_classifier(("en", "de"))
    start = time.perf_counter()
    languages = {
        "en": [classify(source) for source, _ in sample],
        "de": [classify(target) for _, target in sample],
    }
    rate = 2 * len(sample) / (time.perf_counter() - start)
    swapped = languages["de"]  # a source that is German in truth
    others = [] if foreign is None else [classify(line) for line in islice(read_lines(foreign), PAIRS)]
    print(f"{prefix}: {len(sample):,} pairs, {rate:,.0f} lines a second")
    print("certainty   pairs left out   German for English   another language for English")
    for least in CERTAINTIES:
        wrong = sum(
            any(
                language != side and probability >= least
                for side, (language, probability) in zip(languages, pair, strict=True)
            )
            for pair in zip(*languages.values(), strict=True)
        )
        caught = [
            sum(name != "en" and p >= least for name, p in rows) / max(1, len(rows))
            for rows in (swapped, others)
        ]
        print(f"{least:9.1f}{wrong / len(sample):17.2%}{caught[0]:21.2%}{caught[1]:31.2%}")


def noise(prefix: str) -> None:
    """Prints batches a second, and padded target positions a pair, with each kind of noise."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"{prefix}: one epoch in batches of 64")
        for name, section in NOISES.items():
            data = {"source": "en", "target": "de", "train": [prefix], "valid": prefix, "noise": section}
            recipe = Recipe(
                name="x", output="x", data=Data.model_validate(data), training=Training(max_updates=1)
            )
            prepared = prepare(recipe, Path(folder) / "store", [Path.cwd()], show_progress=False)
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
            print(
                f"{name:<22}{planned:6.2f} s to plan{rate:8,.0f} batches/s{padded / real - 1:9.2%} padding, cut"
            )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("prefixes", nargs="+", help="texts in English and German, named as in data.train")
    parser.add_argument("--foreign", type=Path, help="text in another language")
    given = parser.parse_args()
    for prefix in given.prefixes:
        certainties(prefix, given.foreign)
    noise(given.prefixes[0])


if __name__ == "__main__":
    main()
