"""Batch shape, vocabulary sizes and buckets of a recipe, from its prepared text or from the recipe alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from econmt.bench.training import vocabulary_sizes
from econmt.config import limits
from econmt.config.recipe import Recipe, TextData, find_recipe
from econmt.data.batching.batches import rows_of_batch, training_batches
from econmt.data.batching.bucket_shapes import LEAST_PRICED
from econmt.data.batching.store import PreparedData, holds_text_of, open_prepared, prepare, store_folder
from econmt.data.text.corpus import search_path
from econmt.errors import InputError
from econmt.options.shared_options import BatchChoice
from econmt.tasks.protocol import Shape, Task
from econmt.tasks.registry import make_task, task_of_sizes
from econmt.training.choice import frequent_shape

MOST_BUCKETS = 12
"""Maximum number of buckets that are printed."""


class Workload(NamedTuple):
    """Task and shape of a batch to profile.

    Attributes:
        frequent: shape of the most frequent batches, for which a run chooses implementations.
        buckets: (source, target) positions of the recipe's buckets.
        notes: sentences that explain the shape.
    """

    task: Task
    shape: Shape
    frequent: Shape
    buckets: list[tuple[int, int]]
    notes: list[str]


def find_workload(name: str, recipe: Recipe, batch: BatchChoice, data_dir: Path | None) -> Workload:
    """Finds the batch of a recipe to profile.

    Args:
        name, recipe: file or shipped name of the recipe, and the recipe. batch: options that change the batch.
        data_dir: folder with the text, which is prepared if necessary; None: only prepared text is used.
    """
    if isinstance(recipe.data, TextData):
        return _text_workload(recipe, _prepared(name, recipe, data_dir), batch)
    bucket = None if batch.bucket is None else parse_bucket(batch.bucket)
    prepared = _prepared(name, recipe, data_dir)
    task, shape, frequent, buckets, notes = (
        _from_recipe(recipe) if prepared is None else _from_text(recipe, prepared)
    )
    if bucket is not None:
        shape = Shape(rows_of_batch(recipe.training.batch, bucket[1]), *bucket)
        frequent = shape if prepared is None else frequent
        buckets, notes = [bucket], notes[1:]
    if batch.batch is not None:
        shape, frequent = shape._replace(rows=batch.batch), frequent._replace(rows=batch.batch)
    return Workload(task, shape, frequent, buckets, notes)


def _text_workload(recipe: Recipe, prepared: PreparedData | None, batch: BatchChoice) -> Workload:
    """Returns the longest windows of a language model."""
    if batch.bucket is not None:
        raise InputError(
            f"--bucket '{batch.bucket}': a language model has no buckets; give training.bptt=NUMBER"
        )
    training = recipe.training
    shape = Shape(batch.batch or training.batch.size, 1, training.bptt)
    if prepared is not None:
        task = make_task(recipe, prepared)
        shape = shape._replace(target=task.batches(prepared).worst_batch().positions[1])
        note = f"Shape: a window of the text in {prepared.folder}."
    else:
        task = task_of_sizes(recipe, vocabulary_sizes(recipe))
        note = (
            f"The recipe's text is not prepared in {store_folder(recipe)}, so the size of the vocabulary is the "
            "recipe's; econmt prepare, or --data-dir, for that of the text."
        )
    return Workload(task, shape, shape, [shape[1:]], [note])


def parse_bucket(text: str) -> tuple[int, int]:
    """Reads source and target positions such as "100x80"; raises InputError for other text."""
    match = re.fullmatch(r"\s*([1-9][0-9]{0,5})\s*[xX×]\s*([1-9][0-9]{0,5})\s*", text)
    if match is None:
        raise InputError(f"--bucket '{text}': expected source x target positions, as 100x80")
    sizes = int(match[1]), int(match[2])
    if max(sizes) > limits.POSITIONS:
        raise InputError(f"--bucket '{text}': at most {limits.POSITIONS} positions on a side")
    return sizes


def _prepared(name: str, recipe: Recipe, data_dir: Path | None) -> PreparedData | None:
    folder = store_folder(recipe)
    if data_dir is not None:
        search = search_path(find_recipe(name).parent, data_dir)
        return prepare(recipe, folder, search, show_progress=True)
    return open_prepared(folder) if holds_text_of(recipe, folder) else None


def _from_text(recipe: Recipe, prepared: PreparedData) -> Workload:
    batches = training_batches(recipe, prepared)
    worst = batches.worst_batch()
    rows, width = worst.source.shape
    shape = Shape(rows, width, worst.target_output.shape[1])
    # By rising target, then source positions.
    widest = {bucket.target: bucket.source for bucket in batches.shapes()}
    buckets = _downsampled([(source, target) for target, source in widest.items()])
    task = task_of_sizes(recipe, make_task(recipe, prepared).sizes)
    note = f"Shape: the largest batch of the text in {prepared.folder}, every row full."
    return Workload(task, shape, frequent_shape(batches), buckets, [note])


def _from_recipe(recipe: Recipe) -> Workload:
    task = task_of_sizes(recipe, vocabulary_sizes(recipe))
    longest, width = recipe.pairs.max_length, recipe.training.bucket_width
    most = recipe.training.max_buckets
    step = width or -(-longest // (LEAST_PRICED if most is None else most))
    widest = -(-(longest + 1) // width) * width if width else longest + 1
    shape = Shape(rows_of_batch(recipe.training.batch, longest), longest, longest)
    diagonal = [(length, length) for length in (*range(step, longest, step), longest)]
    notes = [
        f"Shape: data.max_length, {longest}, on both sides, every row full; the longest pairs of a text may take up to "
        f"{widest} with the end of the sentence and the bucket's padding.",
        f"The recipe's text is not prepared in {store_folder(recipe)}, so the vocabulary sizes are the recipe's; "
        "econmt prepare, or --data-dir, for the worst bucket of the text.",
    ]
    return Workload(task, shape, shape, _downsampled(diagonal), notes)


def _downsampled(buckets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns at most :data:`MOST_BUCKETS` evenly spaced buckets, including the first and the last."""
    numbers = np.linspace(0, len(buckets) - 1, min(len(buckets), MOST_BUCKETS)).round().astype(int)
    return [buckets[number] for number in numbers.tolist()]
