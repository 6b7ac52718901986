"""Line plots of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from econmt.bench.rows import save_figure

Lines = Mapping[str, Mapping[int, float] | Mapping[float, float]]


def draw_lines(
    lines: Lines,
    path: Path,
    *,
    axes: tuple[str, str],
    title: str = "",
    log: str = "xy",
    across: Mapping[str, float],
) -> None:
    """Draws lines on linear or logarithmic axes.

    Args:
        lines: Points of each line by its label.
        path: Picture to write; InputError is raised if that fails.
        axes: Labels of both axes.
        title: Title of the picture.
        log: Axes with powers of two: "x", "xy" or none.
        across: Heights of dotted horizontal lines by their labels.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    plot: Any = figure.add_subplot()
    for label, points in lines.items():
        plot.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=label)
    for label, height in across.items():
        plot.axhline(height, color="grey", linestyle=":", label=label)
    if "x" in log:
        plot.set_xscale("log", base=2)
    if "y" in log:
        plot.set_yscale("log", base=2)
    else:
        plot.set_ylim(bottom=0)
    plot.set_xlabel(axes[0])
    plot.set_ylabel(axes[1])
    plot.set_title(title)
    if lines:
        plot.legend(fontsize="small")
    save_figure(figure, path)
