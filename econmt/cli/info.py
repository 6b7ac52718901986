"""``econmt info``: describes the contents of a model folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from safetensors import safe_open

import econmt
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.tensor_files import STEPS, model_description, read_metadata
from econmt.config import limits
from econmt.config.json_reader import json_text
from econmt.config.recipe import LanguageModelSection, Model, Recipe
from econmt.config.yaml_reader import check_section
from econmt.data.text.subwords import fingerprint, load_vocabularies, vocabulary_files
from econmt.errors import InputError, printable
from econmt.export.model_folder import ADVICE, read_metrics, recipe_of
from econmt.options.option_groups import argument, option
from econmt.tasks.registry import task_of_sizes
from econmt.training.results import read_results
from econmt_memory.report.tables import WIDTH, format_bytes

METRIC_COLUMNS = (
    ("update", "update", "{:.0f}"),
    ("target_tokens", "tokens", "{:,.0f}"),
    ("seconds", "seconds", "{:,.0f}"),
    ("train_loss", "train loss", "{:.4f}"),
    ("valid_perplexity", "perplexity", "{:.3f}"),
    ("bleu", "BLEU", "{:.2f}"),
)


def info(
    folder: Path = argument(..., help="Model folder, or an export of one."),
    as_json: bool = option(False, "--json", help="Print a JSON object."),
) -> None:
    """Describe a model folder: model, parameters by layer, vocabulary, checkpoints, bytes on disk.

    \b
    Example:
      econmt info runs/multi30k
    """
    contents = inspect_folder(folder)
    if as_json:
        print(json_text(contents, indent=2))
    else:
        print("\n".join(map(printable, describe(contents))))


def describe(contents: dict[str, Any]) -> list[str]:
    """Formats the result of :func:`inspect_folder` as lines of text."""
    model, vocabulary, size = contents["model"], contents["vocabulary"], contents["bytes"]
    languages = f" ({contents['source']} to {contents['target']})" if "source" in contents else ""
    parts = [
        ("name", contents["name"] + languages),
        ("state", _state(contents)),
        *(_translation_model(model) if "encoder" in model else [("layers", _stack(model))]),
        ("embedding", f"{model['embedding']}, tied: {model['weight_tying']}"),
        *_factors(model, vocabulary),
        (
            "vocabulary",
            (f"{vocabulary['source_size']} source, " if "source" in contents else "")
            + f"{vocabulary['target_size']} {'target ' if 'source' in contents else ''}entries, "
            + ", ".join(vocabulary["files"]),
        ),
        ("parameters", f"{contents['parameters']['total']:,}"),
        *((f"  {layer}", f"{count:,}") for layer, count in contents["parameters"]["layers"].items()),
        (
            "bytes",
            f"{format_bytes(size['total'])}: parameters {format_bytes(size['parameters'])}, training state "
            f"{format_bytes(size['training_state'])}, prepared text {format_bytes(size['prepared'])}",
        ),
        (
            "versions",
            ", ".join(f"{name} {version}" for name, version in contents["versions"].items() if version),
        ),
    ]
    width = max(len(name) for name, _ in parts)
    lines = [f"{name:<{width}}  {text}" for name, text in parts]
    folded = [part for line in lines for part in wrap(line, WIDTH, subsequent_indent=" " * (width + 2))]
    return folded + _checkpoints(contents)


def _translation_model(model: dict[str, Any]) -> list[tuple[str, str]]:
    encoder, decoder, attention = model["encoder"], model["decoder"], model["attention"]
    feeding = "input feeding" if decoder["input_feeding"] else "no input feeding"
    return [
        ("encoder", f"{_stack(encoder)}, both directions: {encoder['bidirectional']}"),
        ("decoder", f"{_stack(decoder)}, {feeding}"),
        ("attention", f"{attention['type']} {attention['size']}"),
    ]


def _factors(model: dict[str, Any], vocabulary: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns a line about source factors, if the model has any."""
    streams = zip(model.get("source_factors_num_embed", ()), vocabulary["factor_sizes"], strict=True)
    parts = [f"{size:,} of width {width}" for width, size in streams]
    return [("factors", f"{model['source_factors_combine']}: {', '.join(parts)}")] if parts else []


def _stack(stack: dict[str, Any]) -> str:
    """Describes a stack of layers, with the usual spelling of the cell's name."""
    rank = "" if stack.get("rank") is None else f" of rank {stack['rank']}"
    return f"{stack['layers']} x {stack['cell'].upper().replace('_', '-')} {stack['size']}{rank}"


def _state(contents: dict[str, Any]) -> str:
    if contents["quantized"] is not None and contents["finished"] is None:
        return f"checkpoint {contents['best']}, its matrices in {contents['quantized']}"
    if contents["averaged"]:
        return f"average of checkpoints {', '.join(map(str, contents['averaged']))}"
    if contents["finished"] is None:
        return "not trained yet" if contents["best"] is None else f"export of checkpoint {contents['best']}"
    ending = "training ended" if contents["finished"] else "training has not ended"
    resume = ", can be resumed" if contents["resumable"] and not contents["finished"] else ""
    return f"{ending} at update {contents['last']}, best checkpoint {contents['best']}{resume}"


def _checkpoints(contents: dict[str, Any]) -> list[str]:
    """Returns the lines of a table with a row for each checkpoint and a star at the best one."""
    rows = [[title for _, title, _ in METRIC_COLUMNS] + ["parameters"]]
    for checkpoint in contents["checkpoints"]:
        metrics = {"update": checkpoint["update"], **checkpoint["metrics"]}
        cells = [
            "-" if metrics.get(key) is None else form.format(metrics[key]) for key, _, form in METRIC_COLUMNS
        ]
        best = " *" if checkpoint["update"] == contents["best"] else ""
        rows.append([*cells, ("removed" if checkpoint["file"] is None else "kept") + best])
    if len(rows) == 1:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(METRIC_COLUMNS))]
    aligned = [[f"{cell:>{width}}" for cell, width in zip(row[:-1], widths, strict=True)] for row in rows]
    return ["", *("  ".join([*cells, row[-1]]) for cells, row in zip(aligned, rows, strict=True))]


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
