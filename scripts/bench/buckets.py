"""Measures padding of a recipe's text by batching.

    python -m scripts.bench buckets multi30k --data-dir corpora
    python -m scripts.bench buckets mine.yaml training.batch.size=128

A figure is the work of a whole epoch relative to that of its pairs at their own lengths, with
batches as large as their buckets and with batches cut to their longest pair. A further column is the number
of different shapes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from econmt.config.recipe import BatchSize, Recipe, find_recipe, load_recipe
from econmt.data.batching.batches import BatchIterator, rows_of_batch
from econmt.data.batching.bucket_shapes import MOST_PRICED, SHAPE_PRICE, Derived
from econmt.data.batching.padding import PlannedBatch, measure_padding, planned, random_batches
from econmt.data.batching.pair_flops import PairFlops, pair_flops
from econmt.data.batching.store import PreparedData, prepare
from econmt.data.batching.token_store import TokenStore
from econmt.data.text.corpus import search_path
from econmt.errors import InputError
from scripts.bench.frame import Bench

WIDTHS = (2, 4, 8, 10)
MOST = (4, 8, 12, 16)
POOL = 100
"""Batches of a pool that is drawn at random and then sorted by length."""
ALL = 10**9
COLUMNS = "batches", "shapes", "padded", "shapes if cut", "cut"
"""Columns of the table: padded to buckets, or cut to the longest pair."""


def pooled(store: TokenStore, batch: BatchSize) -> Iterator[PlannedBatch]:
    """Yields the batches of random pools of a hundred batches, each pool sorted by target, then source length."""
    sources, targets = store.source_lengths + 1, store.target_lengths + 1
    order = np.random.default_rng(1).permutation(len(store))
    size = POOL * rows_of_batch(batch, int(targets.mean()))
    for first in range(0, len(order), size):
        pool = order[first : first + size]
        pool = pool[np.lexsort((sources[pool], targets[pool]))]
        start = 0
        while start < len(pool):
            rows = rows_of_batch(batch, int(targets[pool[start]]))
            if batch.type == "word":
                longest = np.maximum.accumulate(targets[pool[start : start + rows]])
                rows = max(1, int((longest * np.arange(1, len(longest) + 1) <= batch.size).sum()))
            pairs = pool[start : start + rows]
            widths = int(sources[pairs].max()), int(targets[pairs].max())
            yield PlannedBatch(sources[pairs], targets[pairs], widths)
            start += len(pairs)


def rows(recipe: Recipe, prepared: PreparedData, work: PairFlops) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table."""
    batch, store = recipe.training.batch, prepared.train
    longest = recipe.pairs.max_length
    padding = measure_padding(random_batches(store.source_lengths, store.target_lengths, batch, ALL), work)
    yield "no buckets, random batches", "", "", f"{padding.trimmed_shapes:,}", _percent(padding.trimmed)
    padding = measure_padding(pooled(store, batch), work)
    name = f"sorted pools of {POOL} batches"
    yield name, "", "", f"{padding.trimmed_shapes:,}", _percent(padding.trimmed)
    kinds: list[tuple[str, int | Derived]] = [(f"fixed buckets of width {width}", width) for width in WIDTHS]
    kinds += [(f"derived, at most {most} buckets", Derived(most, work)) for most in MOST]
    kinds.append(("derived, as many as pay", Derived(MOST_PRICED, work, SHAPE_PRICE)))
    for name, rule in kinds:
        batches = BatchIterator(prepared.train, batch, rule, recipe.training.seed, max_length=longest)
        padding = measure_padding(planned(batches, ALL), work)
        figures = f"{padding.shapes:,}", _percent(padding.padded), f"{padding.trimmed_shapes:,}"
        yield name, *figures, _percent(padding.trimmed)


def _percent(cost: float) -> str:
    return f"+{100 * (cost - 1):.1f} %"


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__)
    add = bench.add_argument
    add("recipe", help="recipe: a file, or a shipped name")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the recipe")
    add("--data-dir", type=Path, help="folder in which the text is looked up")
    given = bench.begin(words)
    recipe = load_recipe(given.recipe, given.overrides)
    if recipe.task != "translation":
        raise InputError(
            f"{recipe.name}: a language model's text has no pairs and no buckets; give a recipe of translation"
        )
    search = search_path(find_recipe(given.recipe).parent, given.data_dir)
    with tempfile.TemporaryDirectory() as temporary:
        prepared = prepare(recipe, Path(temporary) / "prepared", search, show_progress=True)
        work = pair_flops(recipe.translation_model, prepared.vocabularies.target.size)
        bench.report(dict(zip(COLUMNS, row, strict=True)) for row in rows(recipe, prepared, work))
