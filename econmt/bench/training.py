"""Times training steps of a recipe on one random batch without padding: tokens a second, peak memory, feature maps."""

from __future__ import annotations

import time

import torch

from econmt.bench.rows import Row
from econmt.config.recipe import Recipe, TextSubwords, TextWords, WordSubwords
from econmt.engine.devices import peak_memory
from econmt.engine.measurement import measure_step
from econmt.engine.precision import precision_of
from econmt.engine.step import TrainingStep
from econmt.errors import EconmtError
from econmt.tasks.protocol import Shape
from econmt.tasks.registry import task_of_sizes
from econmt_ops.dispatch.timing import quantile, synchronizer

WARM_UP = 3
"""Updates before the first timed one."""

LEAST = 3
"""Minimum number of timed updates."""

FACTOR_VALUES, _BITS = 64, 40
"""Vocabulary size of a source factor, and bits for all factors of a word, which is packed with them into 63 bits."""


def vocabulary_sizes(recipe: Recipe) -> tuple[int, ...]:
    """Returns the sizes of a recipe's source and target vocabularies, or of a language model's only one.

    The sizes of source factors follow, about as many as there are parts of speech, since the recipe does not tell them.
    """
    words = recipe.data.subwords
    if isinstance(words, (TextWords, TextSubwords)):
        return (words.size,)
    if isinstance(words, WordSubwords):
        both = (words.source, words.source if words.joint else words.target)
    else:
        both = (words.size, words.size)
    streams = recipe.pairs.source_factors
    return *both, *(min(FACTOR_VALUES, max(4, 1 << _BITS // len(streams))) for _ in streams)


def row_of(
    name: str, recipe: Recipe, precision: str, length: int, device: torch.device, seconds: float
) -> Row:
    """Measures one recipe, precision and length; returns the figures, or the error if it does not run here."""
    row: Row = {
        "bench": "training",
        "recipe": name,
        "precision": precision,
        "batch": recipe.training.batch.size,
        "length": length,
        "ops": ", ".join(f"{op}={value}" for op, value in recipe.ops.model_dump().items()),
    }
    try:
        return {**row, **measure(recipe, precision, length, device, seconds)}
    except (EconmtError, torch.OutOfMemoryError) as error:
        return {**row, "failure": str(error).splitlines()[0]}


def measure(recipe: Recipe, precision: str, length: int, device: torch.device, seconds: float) -> Row:
    """Trains on one batch for about ``seconds``; returns the figures."""
    torch.manual_seed(recipe.training.seed)
    task = task_of_sizes(recipe, vocabulary_sizes(recipe))
    model = task.build_model().to(device).train()
    step = TrainingStep(task, model, precision_of(precision, device, [recipe]))
    batch = task.example(Shape(recipe.training.batch.size, length, length)).to(device)
    synchronize = synchronizer(device)

    def update() -> float:
        began = time.perf_counter()
        step([batch])
        synchronize()
        return time.perf_counter() - began

    for _ in range(WARM_UP):
        update()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    while len(times) < LEAST or sum(times) < seconds:
        times.append(update())
    peak = peak_memory(device)
    ledger = measure_step(step, batch)
    layers = {layer: size for (kind, layer), size in ledger.entries.items() if kind == "feature maps"}
    median = quantile(times, 0.5)
    return {
        "samples": len(times),
        "milliseconds": 1e3 * median,
        "lowest decile": 1e3 * quantile(times, 0.1),
        "highest decile": 1e3 * quantile(times, 0.9),
        "target tokens/s": batch.target_tokens / median,
        "peak bytes": peak,
        "feature map bytes": sum(layers.values()),
        "of them attention": layers.get("attention", 0),
    }
