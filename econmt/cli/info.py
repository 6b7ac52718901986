"""``econmt info``: describes the contents of a model folder."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any

from econmt.cli.inspection import inspect_folder
from econmt.config.json_reader import json_text
from econmt.errors import printable
from econmt.options.option_groups import argument, option
from econmt_memory.report.layout import WIDTH
from econmt_memory.report.tables import format_bytes

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
    """Formats the result of :func:`econmt.cli.inspection.inspect_folder` as lines of text."""
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
