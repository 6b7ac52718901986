"""Training steps of a recipe on random text: target tokens a second, peak memory, bytes by layer.

Every pair of the batch has the same length, so no position is padding.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from econmt.bench.rows import Row
from econmt.data.batches import Batch, pad_batch
from econmt.errors import EconmtError
from econmt.memory.measure.ledger import measure_step
from econmt.model import build_model
from econmt.recipe import Recipe, WordSubwords
from econmt.training.devices import autocast, peak_memory, resolve_precision
from econmt.training.objective import loss_of_batch
from econmt.training.optimizers import make_optimizer
from econmt_ops.dispatch.timing import quantile, synchronizer

WARM_UP = 3
"""Updates before the first that is timed."""

LEAST = 3
"""Updates that are timed however long they take."""


def vocabulary_sizes(recipe: Recipe) -> tuple[int, int]:
    """Source and target entries that the recipe's vocabularies are meant to have."""
    words = recipe.data.subwords
    return (words.source, words.target) if isinstance(words, WordSubwords) else (words.size, words.size)


def random_batch(sizes: tuple[int, int], rows: int, length: int, device: torch.device) -> Batch:
    """A batch of ``rows`` pairs with ``length`` positions on each side, end of sentence counted."""
    draw = np.random.default_rng(1)
    source, target = (draw.integers(4, size, (rows, length - 1)) for size in sizes)
    lengths = np.full(rows, length - 1)
    return pad_batch(np.arange(rows), source, lengths, target, lengths, (length, length)).to(device)


def row_of(
    name: str, recipe: Recipe, precision: str, length: int, device: torch.device, seconds: float
) -> Row:
    """The figures of one recipe, precision and length; a failure in words if it does not run here."""
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
    """Trains on one batch for about ``seconds`` and returns the figures.

    Raises:
        InputError: the device has not this precision.
        torch.OutOfMemoryError: memory does not suffice.
    """
    torch.manual_seed(recipe.training.seed)
    dtype = resolve_precision(precision, device)
    sizes = vocabulary_sizes(recipe)
    model = build_model(recipe, *sizes).to(device).train()
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters, recipe.training.optimizer)
    batch = random_batch(sizes, recipe.training.batch.size, length, device)
    synchronize = synchronizer(device)

    def loss() -> torch.Tensor:
        with autocast(device, dtype):
            total, tokens = loss_of_batch(model, batch, recipe.training.label_smoothing)
        return total / tokens

    def update() -> float:
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss())
        torch.nn.utils.clip_grad_norm_(parameters.values(), recipe.training.gradient_clipping.threshold)
        optimizer.step()
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
    ledger = measure_step(model, loss, optimizer, batch.target_tokens)
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
