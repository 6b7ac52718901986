"""Draws the learning curve of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from econmt.training.progress import perplexity

WHY_BELOW = (
    "Training perplexity is that of the updates since the previous checkpoint, with dropout and label smoothing;\n"
    "validation perplexity is measured at the checkpoint without them, so its curve may lie below."
)


def draw_learning_curve(
    metrics: Sequence[Mapping[str, float]], best_update: int, path: Path, title: str = "learning curve"
) -> None:
    """Draws perplexity of training and validation text, and BLEU if it was measured, over the updates.

    Args:
        metrics: Rows of metrics.tsv, at least one.
        best_update: Update of the best checkpoint, marked by a vertical line.
        path: File to write; its suffix determines the format.
    """
    # The canvas replaces pyplot: it has no global state and needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    updates = [row["update"] for row in metrics]
    scores = [row["bleu"] for row in metrics]
    with_bleu = not all(math.isnan(score) for score in scores)
    figure = Figure(figsize=(10.0 if with_bleu else 7.0, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if with_bleu else 1, squeeze=False)[0]
    axes[0].plot(updates, [perplexity(row["train_loss"]) for row in metrics], ".-", label="training")
    axes[0].plot(updates, [row["valid_perplexity"] for row in metrics], ".-", label="validation")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("perplexity")
    # Plain numbers rather than powers of ten; more of them if the range is small.
    axes[0].yaxis.set_major_locator(LogLocator(subs=_digits(metrics), numticks=12))
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    if with_bleu:
        axes[1].plot(updates, scores, ".-", color="tab:green", label="validation")
        axes[1].set_ylabel("BLEU")
    for axis in axes:
        axis.axvline(best_update, color="grey", linestyle=":", label="best checkpoint")
        axis.set_xlabel("updates")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title)
    figure.supxlabel(WHY_BELOW, fontsize=8, color="0.35")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


def _digits(metrics: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Returns the leading digits of the perplexity axis's ticks."""
    shown = [value for row in metrics for value in (perplexity(row["train_loss"]), row["valid_perplexity"])]
    finite = [value for value in shown if math.isfinite(value) and value > 0.0] or [1.0]
    span = max(finite) / min(finite)
    if span < 3.0:
        return tuple(1.0 + tenth / 10.0 for tenth in range(90))
    if span < 30.0:
        return (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    return (1.0, 2.0, 5.0) if span < 1000.0 else (1.0,)
