"""Table and picture of the comparison of quality by minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.plots import draw_lines
from scripts.bench.tables import markdown as table


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table: a row for each toolkit, a column of BLEU for each mark that any of them has."""
    marks = sorted({checkpoint["mark"] for row in rows for checkpoint in row["checkpoints"]})
    head = ["toolkit", "precision", "parameters, million", "target tokens/s", "tokens of a batch"]
    head += [f"BLEU at {minutes(mark)} min" for mark in marks]
    head += ["GPU memory of the process, MB", "of it allocated by PyTorch", "start-up, s"]
    lines = [head]
    for row in rows:
        checkpoints = {checkpoint["mark"]: checkpoint for checkpoint in row["checkpoints"]}
        allocated = max((checkpoint["allocated_bytes"] for checkpoint in row["checkpoints"]), default=0)
        lines.append(
            [
                f"{row['name']} {row['version']}",
                row["precision"],
                f"{row['parameters'] / 1e6:.1f}",
                f"{row['tokens_per_second']:,}",
                f"{row['tokens_per_update']:,}",
                *(shown(checkpoints.get(mark)) for mark in marks),
                f"{row['device_bytes'] / 1e6:,.0f}",
                f"{allocated / 1e6:,.0f}",
                f"{row['start_seconds']:.0f}",
            ]
        )
    return "\n".join(table(lines))


def shown(checkpoint: Mapping[str, Any] | None) -> str:
    """Returns the BLEU of a checkpoint; a dash if it has none."""
    return "-" if checkpoint is None or checkpoint["bleu"] is None else f"{checkpoint['bleu']:.1f}"


def minutes(seconds: float) -> str:
    """Returns seconds as minutes without needless digits."""
    return f"{seconds / 60:.3g}"


def _curve(checkpoints: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    return [(each["seconds"], each["bleu"]) for each in checkpoints if each["bleu"] is not None]


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws BLEU over the minutes of training."""
    lines = {
        row["name"]: {seconds / 60: score for seconds, score in row["curve"] or _curve(row["checkpoints"])}
        for row in rows
    }
    title = "Validation text of laws-en-fr, English to French"
    draw_lines(lines, path, axes=("minutes of training", "BLEU"), title=title, log="", across={})
