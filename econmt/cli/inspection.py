"""Reading of a model folder's contents: metrics, parameters by layer, bytes on disk, and a complete description."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import econmt
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.quantized import STEPS
from econmt.checkpoint.tensor_files import model_description, read_metadata
from econmt.config import limits
from econmt.config.optimizer import METRICS
from econmt.config.recipe import LanguageModelSection, Model, Recipe
from econmt.config.yaml_reader import check_section
from econmt.data.text.subwords import fingerprint, load_vocabularies, vocabulary_files
from econmt.errors import InputError
from econmt.export.model_folder import ADVICE, read_metrics, recipe_of
from econmt.tasks.registry import task_of_sizes
from econmt.training.results import read_results


def checkpoint_scores(recipe: Recipe, metrics: list[dict[str, float]]) -> dict[int, float]:
    """Returns each checkpoint's value of the early stopping metric, higher is better."""
    metric = METRICS[recipe.training.early_stopping.metric]
    sign = 1.0 if metric.higher else -1.0
    return {int(row["update"]): sign * row.get(metric.column, math.nan) for row in metrics}


def parameters_by_layer(path: Path, recipe: Recipe) -> dict[str, int]:
    """Counts the parameters of each layer, as the ledger names them, from the header of econmt's parameter file."""
    description = model_description(read_metadata(path), path)
    sides = ("source", "target") if isinstance(recipe.model, Model) else ("vocabulary",)
    sizes = [description.pop(f"{side}_size", None) for side in sides]
    sizes += description.pop("factor_sizes", [])
    description.pop("task", None)
    if not all(type(size) is int and 4 <= size <= limits.WORDS for size in sizes):
        raise InputError(f"{path}: does not describe its model; {ADVICE}")
    kind: type[Model | LanguageModelSection] = type(recipe.model)
    config = check_section(kind, description, str(path), ADVICE)
    # On the meta device a model has names and shapes but no memory.
    with torch.device("meta"):
        task = task_of_sizes(recipe.model_copy(update={"model": config}), sizes)
        layers = task.layers(task.build_model())
    counts = Counter(dict.fromkeys(layers.values(), 0))
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  not a dictionary
            if name.removesuffix(STEPS) != name and name.removesuffix(STEPS) in layers:
                continue  # scales of 8-bit parameters, which are no parameters themselves
            counts[layers.get(name, "other")] += math.prod(file.get_slice(name).get_shape())
    return dict(counts)


def disk_bytes(paths: Iterable[Path]) -> int:
    """Adds the bytes of files, counting hard links once and ignoring files that training removes meanwhile."""
    sizes: dict[tuple[int, int], int] = {}
    for path in paths:
        with suppress(FileNotFoundError):
            status = path.stat()
            sizes[status.st_dev, status.st_ino] = status.st_size if path.is_file() else 0
    return sum(sizes.values())


def inspect_folder(path: Path) -> dict[str, Any]:
    """Describes a model folder as JSON values; not-a-number becomes None."""
    folder = ModelFolder(path)
    recipe = recipe_of(folder)
    numbered = folder.numbered_parameters()
    metrics = read_metrics(folder.metrics)
    vocabularies = load_vocabularies(path)
    best_metadata = read_metadata(folder.best) if folder.best.is_file() else {}
    best_update = int(best_metadata["update"]) if "update" in best_metadata else None
    newest = folder.best if folder.best.is_file() else numbered[max(numbered)] if numbered else None
    layers = parameters_by_layer(newest, recipe) if newest else {}
    saved = read_metadata(newest).get("vocabulary") if newest else None
    if saved is not None and saved != fingerprint(path):
        raise InputError(
            f"{path}: {newest.name if newest else ''} was trained with another vocabulary than that in the folder"
        )
    rows = {int(row["update"]): row for row in metrics}
    return {
        "folder": str(path),
        "name": recipe.name,
        "task": recipe.task,
        **recipe.data.model_dump(include={"text", "source", "target"}),
        "model": recipe.model.model_dump(mode="json"),
        "parameters": {"total": sum(layers.values()), "layers": layers},
        "vocabulary": {
            "files": [file.name for file in vocabulary_files(path)],
            "source_size": vocabularies.source.size,
            "target_size": vocabularies.target.size,
            "factor_sizes": list(vocabularies.factor_sizes),
            "fingerprint": fingerprint(path),
        },
        "best": best_update,
        "averaged": [int(update) for update in best_metadata.get("averaged", "").split()] or None,
        "quantized": best_metadata.get("quantized") or None,
        "last": max(rows) if rows else None,
        "finished": _finished(folder, rows),
        "resumable": bool(folder.commits()),
        "checkpoints": [
            {
                "update": update,
                "file": numbered[update].name if update in numbered else None,
                "metrics": {
                    key: value if math.isfinite(value) else None
                    for key, value in rows.get(update, {}).items()
                },
            }
            for update in sorted(set(rows) | set(numbered))
        ],
        "bytes": {
            "parameters": disk_bytes((*numbered.values(), folder.best)),
            "training_state": disk_bytes(folder.states.rglob("*")),
            "prepared": disk_bytes(folder.prepared.rglob("*")),
            "total": disk_bytes(path.rglob("*")),
        },
        "versions": {
            "format": best_metadata.get("format"),
            "econmt": econmt.__version__,
            "torch": str(torch.__version__),
        },
    }


def _finished(folder: ModelFolder, rows: dict[int, dict[str, float]]) -> bool | None:
    """Returns True if training has finished, or None if the folder has no training state, as after an export."""
    if not rows:
        return None
    results = read_results(folder)
    return results is not None and results.update >= max(rows)
