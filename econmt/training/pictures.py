"""The picture of a learning curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from econmt.training.progress import perplexity


def draw_learning_curve(metrics: Sequence[Mapping[str, float]], best_update: int, path: Path) -> None:
    """Draws perplexity of training and validation text, and BLEU if it was measured, over the updates.

    Args:
        metrics: rows of metrics.tsv, at least one.
        best_update: the best checkpoint, marked by a vertical line.
        path: where to write the picture; its suffix chooses the format.
    """
    # The canvas is used instead of pyplot: no global state, and no display is needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    updates = [row["update"] for row in metrics]
    scores = [row["bleu"] for row in metrics]
    with_bleu = not all(math.isnan(score) for score in scores)
    figure = Figure(figsize=(10.0 if with_bleu else 5.5, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if with_bleu else 1, squeeze=False)[0]
    axes[0].plot(updates, [perplexity(row["train_loss"]) for row in metrics], ".-", label="training")
    axes[0].plot(updates, [row["valid_perplexity"] for row in metrics], ".-", label="validation")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("perplexity")
    if with_bleu:
        axes[1].plot(updates, scores, ".-", color="tab:green", label="validation")
        axes[1].set_ylabel("BLEU")
    for axis in axes:
        axis.axvline(best_update, color="grey", linestyle=":", label="best checkpoint")
        axis.set_xlabel("updates")
        axis.grid(alpha=0.3)
        axis.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
