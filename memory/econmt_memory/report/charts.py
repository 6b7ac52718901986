"""Charts of the page as SVG; colours are CSS classes, whose values for light and dark are in the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
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

_BAR, _STEP = 40, 58
_LABELS, _FIGURES = 270, 300
"""Widths of the texts before and behind bars."""

PLOT_LEFT = 112
PLOT_WIDTH = WIDTH - PLOT_LEFT - 14
"""Left edge and width of a timeline's plot, which the page's cursor needs."""

_PLOT_TOP, _PLOT_HEIGHT = 54, 400
_PLOT_BOTTOM = _PLOT_TOP + _PLOT_HEIGHT


def escape(text: object) -> str:
    """Escapes text of any origin for HTML, control characters included."""
    return html.escape(printable(text))


class Part(NamedTuple):
    """Segment of a bar: the kind that determines its colour, its length, and its tooltip."""

    kind: str
    amount: float
    title: str


class Bar(NamedTuple):
    """Stacked bar: a label before it, its segments, and a figure and a highlighted remark behind it."""

    label: str
    parts: list[Part]
    figure: str
    remark: str = ""


def css_class(kind: str) -> str:
    """Returns the CSS class of a kind: feature maps -> k-feature-maps."""
    return "k-" + kind.replace(" ", "-")


def legend(kinds: Sequence[str]) -> str:
    """Returns the legend of the colours."""
    items = "".join(
        f'<li><span class="swatch {css_class(kind)}"></span>{escape(kind)}</li>' for kind in kinds
    )
    return f'<ul class="legend">{items}</ul>'


def bars(rows: Sequence[Bar], description: str, *, largest: float) -> str:
    """Draws horizontal stacked bars; ``description`` is for screen readers, ``largest`` fills the width."""
    full_width = WIDTH - _LABELS - _FIGURES
    height = _STEP * len(rows) + 6
    pieces = [_open(height, description)]
    for number, row in enumerate(rows):
        top = 6 + number * _STEP
        middle = top + _BAR / 2
        pieces.append(
            f'<text class="label" x="{_LABELS - 14}" y="{middle:.1f}" text-anchor="end">{escape(row.label)}</text>'
        )
        x = float(_LABELS)
        for part in row.parts:
            width = full_width * part.amount / max(1, largest)
            pieces.append(
                f'<rect class="{css_class(part.kind)}" x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" '
                f'data-kind="{escape(part.kind)}" data-amount="{part.amount}">'
                f"<title>{escape(part.title)}</title></rect>"
            )
            text = _inside(part, row, width)
            if text:
                pieces.append(
                    f'<text class="inside on-{css_class(part.kind)}" x="{x + width / 2:.1f}" y="{middle:.1f}" '
                    f'text-anchor="middle">{escape(text)}</text>'
                )
            x += width
        pieces.append(
            f'<text class="value" x="{x + 12:.1f}" y="{middle:.1f}">{escape(row.figure)}'
            f'<tspan class="remark" dx="14">{escape(row.remark)}</tspan></text>'
        )
    pieces.append("</svg></div>")
    return "".join(pieces)


def _inside(part: Part, row: Bar, width: float) -> str:
    """Returns the text inside a segment: kind and share of the bar, only the share, or nothing, as fits."""
    if len(row.parts) == 1:
        return ""
    share = format_share(part.amount, sum(other.amount for other in row.parts))
    texts = (f"{part.kind} {share}", share)
    return next((text for text in texts if len(text) * _CHARACTER + 12 < width), "")


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
    moments: Sequence[Moment], description: str, *, largest: int, timed: bool, before: int | None
) -> str:
    """Draws live bytes over a step, coloured by phase, with the peak marked.

    Args:
        description: Text for screen readers.
        largest: Largest number of bytes that must fit.
        timed: True if moments are milliseconds; False if they are numbers of changes.
        before: Peak of the reference, drawn as a line; None: no line.
    """
    peak = max(moments, key=lambda moment: moment.bytes)
    sizes = ticks(largest)
    plot = Plot(moments[-1].milliseconds or 1.0, sizes[-1] or 1)
    right = PLOT_LEFT + PLOT_WIDTH
    pieces = [_open(_PLOT_BOTTOM + 66, description, "timeline")]
    for size in sizes:
        y = plot.up(size)
        pieces.append(
            f'<line class="grid" x1="{PLOT_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{PLOT_LEFT - 12}" y="{y:.1f}" text-anchor="end">{_short(size)}</text>'
        )
    runs = [list(run) for _, run in groupby(moments, key=attrgetter("phase"))]
    pieces += [
        _area(run, after[0], plot) for run, after in zip(runs, [*runs[1:], runs[-1][-1:]], strict=True)
    ]
    pieces += [
        f'<text class="tick" x="{plot.across(tick):.1f}" y="{_PLOT_BOTTOM + 22}" '
        f'text-anchor="middle">{tick:,.0f}</text>'
        for tick in ticks(plot.span)
        if tick <= plot.span
    ]
    unit = "milliseconds" if timed else "allocations and releases, one after the other"
    pieces.append(f'<text class="axis" x="{right}" y="{_PLOT_BOTTOM + 50}" text-anchor="end">{unit}</text>')
    x, y = plot.across(peak.milliseconds), plot.up(peak.bytes)
    on_the_left = x < PLOT_LEFT + PLOT_WIDTH / 2
    if before is not None:
        height = plot.up(before)
        text_x, anchor = (right - 6.0, "end") if on_the_left else (PLOT_LEFT + 6.0, "start")
        pieces.append(
            f'<line class="before" x1="{PLOT_LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>'
            f'<text class="before-label" x="{text_x}" y="{height - 16:.1f}" text-anchor="{anchor}">'
            f"reference: {format_bytes(before)}</text>"
        )
    text_x, anchor = (x + 12, "start") if on_the_left else (x - 12, "end")
    pieces.append(
        f'<line class="cursor" y1="{_PLOT_TOP}" y2="{_PLOT_BOTTOM}" visibility="hidden"/>'
        f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="8" data-bytes="{peak.bytes}"/>'
        f'<text class="peak-label" x="{text_x:.1f}" y="{y - 18:.1f}" text-anchor="{anchor}">'
        f"peak {format_bytes(peak.bytes)}</text></svg></div>"
    )
    return "".join(pieces)


def _area(run: Sequence[Moment], end: Moment, plot: Plot) -> str:
    """Draws the area under consecutive moments of a phase; bytes are constant between two moments."""
    phase = run[0].phase
    path = [f"M{plot.across(run[0].milliseconds):.1f} {_PLOT_BOTTOM}V{plot.up(run[0].bytes):.1f}"]
    path += [f"H{plot.across(moment.milliseconds):.1f}V{plot.up(moment.bytes):.1f}" for moment in run[1:]]
    path.append(f"H{plot.across(end.milliseconds):.1f}V{_PLOT_BOTTOM}Z")
    return f'<path class="{css_class(phase)}" d="{"".join(path)}"><title>{phase}</title></path>'


def ticks(largest: float) -> list[float]:
    """Returns at most six round numbers from 0 to ``largest`` or slightly more."""
    step = 10.0 ** math.floor(math.log10(max(largest, 1e-9)))
    step = next(step * factor for factor in (0.2, 0.25, 0.5, 1.0, 2.0) if step * factor * 5 >= largest)
    return [step * number for number in range(math.ceil(largest / step - 1e-9) + 1)]


def _short(size: float) -> str:
    """Formats a round number of bytes: 2.5 GB, 400 MB."""
    number, unit = format_bytes(size).split()
    return f"{float(number):g} {unit}"


def _open(height: float, description: str, kind: str = "bars") -> str:
    # The frame scrolls on a phone, where the chart stays wide enough to be legible.
    return (
        '<div class="chart">'
        f'<svg class="{kind}" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(description)}">'
    )
