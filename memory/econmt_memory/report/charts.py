"""Charts of the page as SVG; colours are CSS classes, whose values for light and dark are in the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from econmt_memory.measure.ledger import Moment
from econmt_memory.report.tables import format_bytes, format_share
from econmt_memory.report.text import printable

WIDTH = 1200
"""Units of a chart's coordinates; the page scales charts to its own width."""

_CHARACTER = 10.0
"""Approximate width of a character of a label."""

_BAR_WIDTH = 630
"""Width of the largest bar on a wide page."""

PLOT_LEFT = 168
PLOT_WIDTH = WIDTH - PLOT_LEFT - 14
"""Left edge and width of a timeline's plot, which the page's cursor needs."""

_PLOT_TOP, _PLOT_HEIGHT = 70, 400
_PLOT_BOTTOM = _PLOT_TOP + _PLOT_HEIGHT


def escape(text: object) -> str:
    """Escapes text of any origin for HTML, control characters included."""
    return html.escape(printable(text))


class Bar(NamedTuple):
    """Stacked bar: a label before it, amounts by kind, and a figure and a highlighted remark behind it.

    ``words`` formats the amounts for tooltips.
    """

    label: str
    amounts: Mapping[str, float]
    figure: str
    remark: str = ""
    words: Callable[[float], str] = format_bytes


def css_class(kind: str) -> str:
    """Returns the CSS class of a kind: feature maps -> k-feature-maps."""
    return "k-" + kind.replace(" ", "-")


def legend(kinds: Sequence[str]) -> str:
    """Returns the legend of the colours; none without kinds."""
    items = "".join(
        f'<li><span class="swatch {css_class(kind)}"></span>{escape(kind)}</li>' for kind in kinds
    )
    return f'<ul class="legend">{items}</ul>' if kinds else ""


def bars(title: str, kinds: Sequence[str], rows: Sequence[Bar], largest: float) -> str:
    """Draws horizontal stacked bars with the legend of the kinds that occur; ``largest`` fills the width."""
    used = {kind for row in rows for kind, amount in row.amounts.items() if amount}
    read_out = ", ".join(f"{row.label} {row.figure} {row.remark}".strip() for row in rows)
    drawn = []
    for row in rows:
        segments = "".join(_segment(row, kind, largest) for kind, amount in row.amounts.items() if amount)
        drawn.append(
            f'<div class="bar"><span class="label">{escape(row.label)}</span><span class="line">{segments}'
            f'<span class="value">{escape(row.figure)} <b class="remark">{escape(row.remark)}</b></span></span></div>'
        )
    return (
        legend([kind for kind in kinds if kind in used])
        + f'<div class="bars" role="img" aria-label="{escape(f"{title}: {read_out}")}">{"".join(drawn)}</div>'
    )


def _segment(bar: Bar, name: str, largest: float) -> str:
    """Returns the segment of a kind; inside are kind and share of the bar, only the share, or nothing."""
    amount, whole, kind = bar.amounts[name], sum(bar.amounts.values()), css_class(name)
    percent, share = format_share(amount, whole), amount / max(1, largest)
    texts = (f"{name} {percent}", percent) if amount < whole else ()
    text = next((text for text in texts if len(text) * _CHARACTER + 12 < share * _BAR_WIDTH), "")
    title = escape(f"{bar.label}, {name}: {bar.words(amount)}")
    return (
        f'<span class="segment {kind} on-{kind}" style="--share: {share:.5f}" data-kind="{escape(name)}" '
        f'data-amount="{amount}" title="{title}"><i class="inside">{escape(text)}</i></span>'
    )


class Plot(NamedTuple):
    """Coordinate system of a timeline; ``span``: milliseconds of the full width, ``top``: bytes of the full height."""

    span: float
    top: float

    def across(self, milliseconds: float) -> float:
        """Returns the x coordinate of a time."""
        return PLOT_LEFT + PLOT_WIDTH * milliseconds / self.span

    def up(self, size: float) -> float:
        """Returns the y coordinate of a number of bytes."""
        return _PLOT_BOTTOM - _PLOT_HEIGHT * size / self.top


def timeline(
    moments: Sequence[Moment], description: str, *, largest: int, unit: str, before: Sequence[Moment] = ()
) -> str:
    """Draws live bytes over a step, coloured by phase, with the peak marked.

    Args:
        description: Text for screen readers.
        largest: Largest number of bytes that must fit.
        unit: Unit of the moments, below the plot.
        before: Moments of the reference, whose outline is drawn above; empty: none.
    """
    sizes = ticks(largest)
    plot = Plot(max(each[-1].milliseconds for each in (moments, before) if each) or 1.0, sizes[-1] or 1)
    right = PLOT_LEFT + PLOT_WIDTH
    pieces = [
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {_PLOT_BOTTOM + 104}" role="img" data-span="{plot.span}" '
        f'aria-label="{escape(description)}">'
    ]
    for size in sizes:
        y = plot.up(size)
        pieces.append(
            f'<line class="grid" x1="{PLOT_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{PLOT_LEFT - 12}" y="{y:.1f}" text-anchor="end">{_short(size)}</text>'
        )
    runs = [list(run) for _, run in groupby(moments, key=attrgetter("phase"))]
    pieces += [
        f'<path class="{css_class(run[0].phase)}" d="{_area(run, after[0], plot)}">'
        f"<title>{run[0].phase}</title></path>"
        for run, after in zip(runs, [*runs[1:], runs[-1][-1:]], strict=True)
    ]
    pieces += [
        f'<text class="tick" x="{plot.across(tick):.1f}" y="{_PLOT_BOTTOM + 30}" '
        f'text-anchor="middle">{tick:,.0f}</text>'
        for tick in ticks(plot.span)
        if tick <= plot.span
    ]
    pieces.append(f'<text class="axis" x="{right}" y="{_PLOT_BOTTOM + 78}" text-anchor="end">{unit}</text>')
    if before:
        pieces.append(f'<path class="before" d="{_area(before, before[-1], plot)}"/>')
        pieces.append(_label("before-label", max(before, key=attrgetter("bytes")), "reference:", plot))
    pieces.append(f'<line class="cursor" y1="{_PLOT_TOP}" y2="{_PLOT_BOTTOM}" visibility="hidden"/>')
    peak = max(moments, key=attrgetter("bytes"))
    x, y = plot.across(peak.milliseconds), plot.up(peak.bytes)
    pieces.append(f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="8" data-bytes="{peak.bytes}"/>')
    return "".join([*pieces, _label("peak-label", peak, "peak", plot), "</svg>"])


def _label(kind: str, peak: Moment, words: str, plot: Plot) -> str:
    """Returns the text that names a peak, above it and towards the middle of the plot."""
    x, y = plot.across(peak.milliseconds), plot.up(peak.bytes) - 24
    gap, anchor = (12, "start") if x < PLOT_LEFT + PLOT_WIDTH / 2 else (-12, "end")
    text = f"{words} {format_bytes(peak.bytes)}"
    return f'<text class="{kind}" x="{x + gap:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _area(run: Sequence[Moment], end: Moment, plot: Plot) -> str:
    """Returns the path around the area under some moments; bytes are constant between two moments."""
    path = [f"M{plot.across(run[0].milliseconds):.1f} {_PLOT_BOTTOM}V{plot.up(run[0].bytes):.1f}"]
    path += [f"H{plot.across(moment.milliseconds):.1f}V{plot.up(moment.bytes):.1f}" for moment in run[1:]]
    return "".join([*path, f"H{plot.across(end.milliseconds):.1f}V{_PLOT_BOTTOM}Z"])


def ticks(largest: float) -> list[float]:
    """Returns at most six round numbers from 0 to ``largest`` or slightly more."""
    step = 10.0 ** math.floor(math.log10(max(largest, 1e-9)))
    step = next(step * factor for factor in (0.2, 0.25, 0.5, 1.0, 2.0) if step * factor * 5 >= largest)
    return [step * number for number in range(math.ceil(largest / step - 1e-9) + 1)]


def _short(size: float) -> str:
    """Formats a round number of bytes: 2.5 GB, 400 MB."""
    number, unit = format_bytes(size).split()
    return f"{float(number):g} {unit}"
