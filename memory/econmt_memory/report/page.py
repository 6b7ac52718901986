"""HTML page of a ledger, which needs no network and no other files; and its parts, of which other pages consist."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from econmt_memory.measure.ledger import CATEGORIES, Ledger
from econmt_memory.measure.storages import PHASES
from econmt_memory.report import charts
from econmt_memory.report.charts import Bar, escape
from econmt_memory.report.ledger_tables import downsample, peak_moment
from econmt_memory.report.tables import Cell, ReportTable, format_bytes, format_share

_TEMPLATE = Path(__file__).with_name("page.html")


def account_page(
    ledger: Ledger,
    title: str,
    tables: Mapping[str, ReportTable],
    notes: Sequence[str],
    before: Ledger | None = None,
) -> str:
    """Returns the page of a memory account.

    Args:
        tables: Tables below the charts, by their kinds; "ledger" belongs to the bars.
        notes: Sentences for the reader.
        before: Ledger with which it is compared; None: none.
    """
    at_peak = layer_bars(ledger, max(ledger.by_layer().values(), default=0))
    others = "".join(
        f"<h3>{escape(table.title)}</h3>{html_table(kind, table)}"
        for kind, table in tables.items()
        if kind != "ledger"
    )
    live = live_chart(ledger, before) if ledger.timeline else ""
    cells = html_table("ledger", tables["ledger"]) if "ledger" in tables else ""  # of a block without memory
    used = (kind for kind in CATEGORIES if ledger.category(kind))
    terms = "".join(f"<dt>{kind}</dt><dd>{CATEGORIES[kind]}</dd>" for kind in used)
    sections = section("Where the bytes are", f'{at_peak}<dl class="terms">{terms}</dl>{cells}')
    sections += section("Live memory over the step", live + others)
    tiles = (
        (format_bytes(ledger.peak), "live at the moment of the tables", f"{ledger.peak:,} bytes"),
        (format_bytes(ledger.stashed), "feature maps kept for the backward pass", ""),
    )
    paragraphs = "".join(f"<p>{escape(note)}</p>" for note in notes)
    content = (
        f'<div class="panel" data-technique="0">{sections}</div><section class="made">{paragraphs}</section>'
    )
    return document(title, f"<p class='what'>{escape(ledger.device)}</p>", tiles, content, [ledger])


def document(
    title: str, subtitle: str, tiles: Sequence[tuple[str, str, str]], content: str, ledgers: Sequence[Ledger]
) -> str:
    """Fills the template; tiles are a figure, what it counts, and details; the cursor shows the ledgers' live bytes."""
    moments = []
    for ledger in ledgers:
        points = downsample(ledger.timeline)
        moments.append([(round(time, 3), size, PHASES.index(phase)) for time, size, phase in points])
    data = {"moments": moments, "phases": PHASES, "left": charts.PLOT_LEFT, "width": charts.PLOT_WIDTH}
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        subtitle=subtitle,
        tiles="".join(
            f'<div class="tile"><span class="figure">{escape(figure)}</span><span class="what">{escape(what)}</span>'
            f'<span class="detail">{escape(detail)}</span></div>'
            for figure, what, detail in tiles
        ),
        content=content,
        # An unescaped "<" could end the script.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )


def section(title: str, content: str) -> str:
    """Returns a section with a heading."""
    return f"<section><h2>{title}</h2>{content}</section>"


def layer_bars(ledger: Ledger, largest: int) -> str:
    """Returns bars of the bytes at the peak, one per layer; ``largest`` bytes fill the width."""
    rows = []
    sizes = ledger.by_layer()
    for layer in ledger.layers:
        amounts = {category: ledger.entries[category, layer] for category in CATEGORIES}
        figure = f"{format_bytes(sizes[layer])} · {format_share(sizes[layer], sizes.total())}"
        rows.append(Bar(layer, amounts, figure))
    return charts.bars("Bytes at the peak by layer", list(CATEGORIES), rows, largest)


def live_chart(ledger: Ledger, before: Ledger | None = None, largest: int = 0, *, slider: bool = True) -> str:
    """Returns the chart of live bytes; ``before``: the reference's ledger, ``largest``: bytes of the full height."""
    peak = peak_moment(ledger)
    words = f"Live bytes over the step. Peak {format_bytes(peak.bytes)} in the {peak.phase} phase."
    moments, others = downsample(ledger.timeline), [] if before is None else downsample(before.timeline)
    timed = bool(ledger.seconds)
    unit = "milliseconds" if timed else "allocations and releases, one after the other"
    if before is not None and not (timed and before.seconds):  # numbers of changes differ
        unit = "allocations and releases, both over the same width"
        scale = moments[-1].milliseconds / (others[-1].milliseconds or 1.0)
        others = [moment._replace(milliseconds=scale * moment.milliseconds) for moment in others]
    largest = max([largest, *(moment.bytes for moment in (*moments, *others))])
    chart = charts.timeline(moments, words, largest=largest, unit=unit, before=others)
    marked = ' data-timed=""' if timed else ""
    chooser = (
        f'<label class="moment"{marked}><span>Moment</span>'
        '<input type="range" min="0" max="1000" value="0" step="1" /><output></output></label>'
    )
    return charts.legend(PHASES) + chart + (chooser if slider else "")


def html_table(kind: str, table: ReportTable) -> str:
    """Returns a table; a row that begins with text is named by it."""
    top = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    body = []
    for first, *others in filter(None, [*table.rows, table.sums, *table.below]):
        head, *columns = table.columns
        named = f'<th scope="row">{escape(first)}</th>' if isinstance(first, str) else _cell(first, head)
        body.append(f"<tr>{named}{''.join(map(_cell, others, columns))}</tr>")
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{kind} figures"><table class="{kind}">'
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(cell: Cell, column: str) -> str:
    """Returns a cell, which names its column on a narrow page."""
    column = f'data-column="{escape(column)}"'
    if isinstance(cell, str):
        return f"<td {column}>{escape(cell)}</td>"
    return f'<td {column} data-bytes="{cell}">{format_bytes(cell) if cell else ""}</td>'
