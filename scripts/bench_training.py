"""Measures training steps of shipped recipes on random text: target tokens a second, peak memory, bytes by layer.

Every pair of the batch has the same length, so no position is padding. Example:
python scripts/bench_training.py --recipes iwslt --precisions float32 --lengths 50 --output bench.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from econmt.data.batches import Batch, pad_batch
from econmt.errors import EconmtError
from econmt.memory.ledger import measure_step
from econmt.memory.report import format_bytes
from econmt.model import TranslationModel
from econmt.recipe import Recipe, WordSubwords, load_recipe
from econmt.training.devices import autocast, peak_memory, resolve_device, resolve_precision
from econmt.training.objective import loss_of_batch
from econmt.training.optimizers import make_optimizer

WARM_UP = 3


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


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    recipe: Recipe, precision: str, length: int, device: torch.device, seconds: float
) -> dict[str, Any]:
    """Trains on one batch for about ``seconds`` and returns the figures."""
    torch.manual_seed(recipe.training.seed)
    dtype = resolve_precision(precision, device)
    sizes = vocabulary_sizes(recipe)
    model = TranslationModel(recipe.model, *sizes).to(device).train()
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters, recipe.training.optimizer)
    batch = random_batch(sizes, recipe.training.batch.size, length, device)

    def loss() -> torch.Tensor:
        with autocast(device, dtype):
            total, tokens = loss_of_batch(model, batch, recipe.training.label_smoothing)
        return total / tokens

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss())
        torch.nn.utils.clip_grad_norm_(parameters.values(), recipe.training.gradient_clipping.threshold)
        optimizer.step()

    for _ in range(WARM_UP):
        update()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began, updates = time.perf_counter(), 0
    while updates < 3 or time.perf_counter() - began < seconds:
        update()
        synchronize(device)
        updates += 1
    elapsed = time.perf_counter() - began
    peak = peak_memory(device)
    ledger = measure_step(model, loss, optimizer, batch.target_tokens)
    layers = {layer: size for (kind, layer), size in ledger.entries.items() if kind == "feature maps"}
    return {
        "precision": precision,
        "batch": recipe.training.batch.size,
        "length": length,
        "updates": updates,
        "milliseconds_per_update": round(1000 * elapsed / updates, 2),
        "target_tokens_per_second": round(batch.target_tokens * updates / elapsed),
        "peak_memory_bytes": peak,
        "feature_map_bytes": sum(layers.values()),
        "feature_map_bytes_by_layer": layers,
    }


def table(results: list[dict[str, Any]]) -> Table:
    """The figures for a person."""
    shown = Table(
        "recipe",
        "precision",
        "batch",
        "length",
        "target tokens/s",
        "ms an update",
        "peak",
        "feature maps",
        "of them attention",
    )
    for result in results:
        if "failure" in result:
            shown.add_row(
                str(result["recipe"]),
                str(result["precision"]),
                "",
                str(result["length"]),
                str(result["failure"]),
            )
            continue
        layers = result["feature_map_bytes_by_layer"]
        sizes = (result["peak_memory_bytes"], result["feature_map_bytes"], layers.get("attention", 0))
        shown.add_row(
            *(str(result[key]) for key in ("recipe", "precision", "batch", "length")),
            f"{result['target_tokens_per_second']:,}",
            str(result["milliseconds_per_update"]),
            *(format_bytes(size) for size in sizes),
        )
    return shown


def main() -> None:
    """Measures what the command line names, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=["iwslt", "groundhog", "best", "multi30k"])
    parser.add_argument("--overrides", nargs="*", default=[], help="KEY=VALUE, for all recipes")
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[25, 50])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line of the table")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    device = resolve_device(options.device)
    results: list[dict[str, Any]] = []
    for name in options.recipes:
        recipe = load_recipe(name, options.overrides)
        for precision in options.precisions:
            for length in options.lengths:
                result: dict[str, Any] = {"recipe": name, "precision": precision, "length": length}
                try:
                    result |= measure(recipe, precision, length, device, options.seconds)
                except (EconmtError, torch.OutOfMemoryError) as error:
                    result["failure"] = str(error).splitlines()[0]
                results.append(result)
    Console(width=140).print(table(results))
    if options.output is not None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
        found = {"device": name, "torch": torch.__version__, "results": results}
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
