"""The charts of the page as SVG text. Colours are classes, which the page's style gives values for light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from econmt.errors import printable
from econmt.memory.measure.ledger import Moment
from econmt.memory.measure.tracker import PHASES
from econmt.memory.report.tables import format_bytes

WIDTH = 1200
"""Units of a chart's coordinates; the page scales charts to its own width."""

_CHARACTER = 10.0
"""Width of a character of a label, roughly."""

_BAR, _STEP = 40, 58

PLOT_LEFT = 112
"""Left edge and width of a timeline's plot, which the page's cursor needs."""
PLOT_WIDTH = WIDTH - PLOT_LEFT - 14

_PLOT_TOP, _PLOT_HEIGHT = 54, 400
_PLOT_BOTTOM = _PLOT_TOP + _PLOT_HEIGHT


def escape(text: object) -> str:
    """Text of unknown origin in HTML: neither marks of HTML nor control characters are left in it."""
    return html.escape(printable(text))


class Part(NamedTuple):
    """A segment of a bar: what its colour stands for, its length (bytes, say), and what to say of it."""

    kind: str
    amount: float
    title: str


class Bar(NamedTuple):
    """A stacked bar: a label at its left, its parts, and at its end a figure and a remark that stands out."""

    label: str
    parts: list[Part]
    figure: str
    remark: str = ""


def css_class(kind: str) -> str:
    """The class of what a colour stands for: feature maps -> k-feature-maps."""
    return "k-" + kind.replace(" ", "-")


def legend(kinds: Sequence[str]) -> str:
    """Returns the legend of the colours."""
    items = "".join(
        f'<li><span class="swatch {css_class(kind)}"></span>{escape(kind)}</li>' for kind in kinds
    )
    return f'<ul class="legend">{items}</ul>'


def bars(rows: Sequence[Bar], description: str, *, largest: float, left: int = 150, right: int = 250) -> str:
    """Horizontal stacked bars.

    Args:
        rows: top first.
        description: for those who hear the page.
        largest: the amount that fills the whole width.
        left: room for the labels.
        right: room for the texts at the bars' ends.
    """
    room = WIDTH - left - right
    height = _STEP * len(rows) + 6
    pieces = [_open(height, description)]
    for number, row in enumerate(rows):
        top = 6 + number * _STEP
        middle = top + _BAR / 2
        pieces.append(
            f'<text class="label" x="{left - 14}" y="{middle:.1f}" text-anchor="end">{escape(row.label)}</text>'
        )
        at = float(left)
        for part in row.parts:
            width = room * part.amount / max(1, largest)
            pieces.append(
                f'<rect class="{css_class(part.kind)}" x="{at:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" '
                f'data-kind="{escape(part.kind)}" data-amount="{part.amount}">'
                f"<title>{escape(part.title)}</title></rect>"
            )
            words = _inside(part, row, width)
            if words:
                pieces.append(
                    f'<text class="inside on-{css_class(part.kind)}" x="{at + width / 2:.1f}" y="{middle:.1f}" '
                    f'text-anchor="middle">{escape(words)}</text>'
                )
            at += width
        pieces.append(
            f'<text class="value" x="{at + 12:.1f}" y="{middle:.1f}">{escape(row.figure)}'
            f'<tspan class="remark" dx="14">{escape(row.remark)}</tspan></text>'
        )
    pieces.append("</svg></div>")
    return "".join(pieces)


def _inside(part: Part, row: Bar, width: float) -> str:
    """The words that fit into a segment: what it is and its share of the bar, or less, or nothing."""
    if len(row.parts) == 1:
        return ""
    share = f"{100 * part.amount / (sum(other.amount for other in row.parts) or 1):.0f} %"
    for words in (f"{part.kind} {share}", share):
        if len(words) * _CHARACTER + 12 < width:
            return words
    return ""


class Plot(NamedTuple):
    """Coordinates of a step's moments in its chart."""

    span: float
    top: float

    def across(self, milliseconds: float) -> float:
        """The x of a moment."""
        return PLOT_LEFT + PLOT_WIDTH * milliseconds / self.span

    def up(self, size: float) -> float:
        """The y of a number of bytes."""
        return _PLOT_BOTTOM - _PLOT_HEIGHT * size / self.top


def timeline(
    moments: Sequence[Moment], description: str, *, largest: int, timed: bool, before: int | None
) -> str:
    """Live bytes over a step, its phases in colours, the peak marked.

    Args:
        moments: of the step, thinned.
        description: for those who hear the page.
        largest: bytes of the full height, or a little less.
        timed: moments are milliseconds; False: they are numbers of changes.
        before: the reference's peak, drawn as a line to compare with; None: there is none.
    """
    peak = max(moments, key=lambda moment: moment.bytes)
    sizes = ticks(largest)
    plot = Plot(moments[-1].milliseconds or 1.0, sizes[-1])
    right = PLOT_LEFT + PLOT_WIDTH
    pieces = [_open(_PLOT_BOTTOM + 66, description, "timeline")]
    for size in sizes:
        y = plot.up(size)
        pieces.append(
            f'<line class="grid" x1="{PLOT_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{PLOT_LEFT - 12}" y="{y:.1f}" text-anchor="end">{_short(size)}</text>'
        )
    pieces += [_area(phase, moments, plot) for phase in PHASES]
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
        at, anchor = (right - 6.0, "end") if on_the_left else (PLOT_LEFT + 6.0, "start")
        pieces.append(
            f'<line class="before" x1="{PLOT_LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>'
            f'<text class="before-label" x="{at}" y="{height - 16:.1f}" text-anchor="{anchor}">'
            f"reference: {format_bytes(before)}</text>"
        )
    at, anchor = (x + 12, "start") if on_the_left else (x - 12, "end")
    pieces.append(
        f'<line class="cursor" y1="{_PLOT_TOP}" y2="{_PLOT_BOTTOM}" visibility="hidden"/>'
        f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="8" data-bytes="{peak.bytes}"/>'
        f'<text class="peak-label" x="{at:.1f}" y="{y - 18:.1f}" text-anchor="{anchor}">'
        f"peak {format_bytes(peak.bytes)}</text></svg></div>"
    )
    return "".join(pieces)


def _area(phase: str, moments: Sequence[Moment], plot: Plot) -> str:
    """The area under one phase: bytes stay as they are until they change."""
    own = [moment for moment in moments if moment.phase == phase]
    if not own:
        return ""
    after = PHASES[PHASES.index(phase) + 1 :]
    end = next((moment for moment in moments if moment.phase in after), own[-1])
    path = [f"M{plot.across(own[0].milliseconds):.1f} {_PLOT_BOTTOM}V{plot.up(own[0].bytes):.1f}"]
    path += [f"H{plot.across(moment.milliseconds):.1f}V{plot.up(moment.bytes):.1f}" for moment in own[1:]]
    path.append(f"H{plot.across(end.milliseconds):.1f}V{_PLOT_BOTTOM}Z")
    return f'<path class="{css_class(phase)}" d="{"".join(path)}"><title>{phase}</title></path>'


def ticks(largest: float) -> list[float]:
    """Round numbers from 0 to ``largest`` or a little more, at most six."""
    step = 10.0 ** math.floor(math.log10(max(largest, 1e-9)))
    step = next(step * factor for factor in (0.2, 0.25, 0.5, 1.0, 2.0) if step * factor * 5 >= largest)
    return [step * number for number in range(math.ceil(largest / step - 1e-9) + 1)]


def _short(size: float) -> str:
    """A round byte count: 2.5 GB, 400 MB."""
    number, unit = format_bytes(size).split()
    return f"{float(number):g} {unit}"


def _open(height: float, description: str, kind: str = "bars") -> str:
    # In a frame that scrolls: on a phone a chart keeps a width at which its words can be read.
    return (
        '<div class="chart">'
        f'<svg class="{kind}" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(description)}">'
    )
