"""A report as one HTML page that needs no network and no other files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from string import Template

from econmt.estimate.kernels import KernelTimes
from econmt.estimate.profiling import Profile
from econmt.estimate.report.data import downsample
from econmt.estimate.report.kernel_tables import classes_table, launches_table
from econmt.estimate.report.report import (
    Report,
    comparison_table,
    faster_text,
    format_precision,
    largest_table,
    layers_table,
    ledger_table,
    peak_moment,
    process_sentence,
    process_table,
    ranks_table,
    reference_of,
    size_of,
    speed_text,
)
from econmt_memory.measure.ledger import CATEGORIES, LAYERS, Ledger
from econmt_memory.measure.storages import PHASES
from econmt_memory.report import charts
from econmt_memory.report.charts import Bar, Part, escape
from econmt_memory.report.tables import Cell, ReportTable, cell_text, faster, format_bytes, format_share, less

_TEMPLATE = Path(__file__).with_name("page.html")

_STASH_ORDER = ("attention", "decoder", "encoder", "output", "embedding", "loss", "other")
"""Layers of a comparison's bars: those that usually save most come first, where a difference is seen best."""


def page(report: Report) -> str:
    """Returns the page's HTML.

    Its sections: headline figures; a comparison if there are several techniques; for each technique the bytes at the
    peak by layer and category, live bytes over the step, and the largest tensors; GPU kernels; and provenance.
    """
    several = len(report.profiles) > 1
    content = []
    if report.ranks:
        content.append(
            _section("What each rank holds at its peak", _table("ranks", ranks_table(report.ranks)))
        )
    content += [_comparison(report.profiles), _chooser(report.profiles)] if several else []
    content += [_panel(report, number) for number in range(len(report.profiles))]
    content += [kernel_section(report.kernels), _provenance(report)]
    title = f"Memory of a training step: {report.recipe}"
    ledgers = [profile.bytes for profile in report.profiles]
    return _document(title, _subtitle(report), _tiles(report), "\n".join(content), ledgers)


def account_page(ledger: Ledger, title: str, tables: Mapping[str, ReportTable], notes: Sequence[str]) -> str:
    """Returns the page of a memory account.

    Args:
        tables: Tables below the charts, by their kinds; "ledger" belongs to the bars.
        notes: Sentences for the reader.
    """
    at_peak = _layer_bars(ledger, max(ledger.by_layer().values(), default=0))
    others = "".join(
        f"<h3>{escape(table.title)}</h3>{_table(kind, table)}"
        for kind, table in tables.items()
        if kind != "ledger"
    )
    timed = bool(ledger.milliseconds)
    live = _timeline(ledger, None, ledger.peak, timed=timed) if ledger.timeline else ""
    cells = _table("ledger", tables["ledger"]) if "ledger" in tables else ""  # of a block without memory
    sections = _section("Where the bytes are", at_peak + cells)
    sections += _section("Live memory over the step", live + others)
    tiles = (
        (format_bytes(ledger.peak), "live at the moment of the tables", f"{ledger.peak:,} bytes"),
        (format_bytes(ledger.stashed), "feature maps kept for the backward pass", ""),
    )
    paragraphs = "".join(f"<p>{escape(note)}</p>" for note in notes)
    content = (
        f'<div class="panel" data-technique="0">{sections}</div><section class="made">{paragraphs}</section>'
    )
    return _document(
        title, f"<p class='what'>{escape(ledger.device)}</p>", _tiles_of(tiles), content, [ledger]
    )


def _document(title: str, subtitle: str, tiles: str, content: str, ledgers: Sequence[Ledger]) -> str:
    """Fills the template; the page's cursor shows the live bytes of the ledgers."""
    moments = [
        [
            [round(moment.milliseconds, 3), moment.bytes, PHASES.index(moment.phase)]
            for moment in downsample(ledger.timeline)
        ]
        for ledger in ledgers
    ]
    data = {"moments": moments, "phases": PHASES, "left": charts.PLOT_LEFT, "width": charts.PLOT_WIDTH}
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        subtitle=subtitle,
        tiles=tiles,
        content=content,
        # An unescaped "<" could end the script.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )


def best_of(profiles: Sequence[Profile]) -> Profile:
    """Returns the profile that the headline compares with the reference: the smallest, and of equals the fastest."""
    alike = [
        each for each in profiles if each.technique.precision.name == profiles[0].technique.precision.name
    ]
    return min(alike, key=lambda each: (each.bytes.peak, -(each.tokens_per_second or 0.0)))


def _subtitle(report: Report) -> str:
    unnamed = "GPU" if report.device.startswith("cuda") else report.machine["processor"]
    device = report.machine.get("GPU", unnamed)
    parts = [
        f"<strong>{escape(report.recipe)}</strong>",
        size_of(report),
        f"vocabulary {' and '.join(f'{size:,}' for size in report.vocabulary)}",
        escape(device),
    ]
    if len(report.profiles) == 1:
        parts.append(format_precision(report.profiles[0]))
    return f"<p class='what'>{' · '.join(parts)}</p><p class='note'>{escape(report.how)}</p>"


def _tiles(report: Report) -> str:
    first = report.profiles[0]
    if len(report.profiles) == 1:
        tiles = [
            (format_bytes(first.bytes.peak), "peak of the training step", ""),
            (format_bytes(first.bytes.stashed), "feature maps kept for the backward pass", ""),
        ]
        if first.tokens_per_second is not None:
            tiles.append((f"{first.tokens_per_second:,.0f}", "target tokens a second", _timed(first)))
    else:
        best = best_of(report.profiles)
        pairs = (
            (first.bytes.stashed, best.bytes.stashed, "kept for the backward pass"),
            (first.bytes.peak, best.bytes.peak, "peak of the whole step"),
        )
        tiles = [
            (less(before, after), what, f"{format_bytes(before)} → {format_bytes(after)}")
            for before, after, what in pairs
        ]
        if first.tokens_per_second is not None and best.tokens_per_second is not None:
            figures = f"{first.tokens_per_second:,.0f} → {best.tokens_per_second:,.0f} target tokens/s"
            tiles.append(
                (faster(first.tokens_per_second, best.tokens_per_second), "the reference's speed", figures)
            )
    return _tiles_of(tiles)


def _tiles_of(tiles: Sequence[tuple[str, str, str]]) -> str:
    """Returns tiles of a figure, what it counts, and details."""
    return "".join(
        f'<div class="tile"><span class="figure">{escape(figure)}</span><span class="what">{escape(what)}</span>'
        f'<span class="detail">{escape(detail)}</span></div>'
        for figure, what, detail in tiles
    )


def _timed(profile: Profile) -> str:
    return "" if profile.timed_shape in (None, profile.shape) else f"measured at {profile.timed_shape}"


def _chooser(profiles: Sequence[Profile]) -> str:
    choices = "".join(
        f'<label><input type="radio" name="technique" value="{number}"{" checked" if number == 0 else ""}>'
        f"<span>{escape(profile.technique.name)}</span></label>"
        for number, profile in enumerate(profiles)
    )
    return f'<fieldset class="chooser"><legend>Show</legend>{choices}</fieldset>'


def _panel(report: Report, number: int) -> str:
    """Returns the sections of one technique."""
    profile = report.profiles[number]
    ledger, times = profile.bytes, profile.times
    name = f": {escape(profile.technique.name)}" if len(report.profiles) > 1 else ""
    reference = reference_of(profile, report.profiles)
    before = None if reference is None else reference.bytes.peak
    highest = max(each.bytes.peak for each in report.profiles)
    chart = _timeline(ledger, before, highest, timed=bool(ledger.milliseconds))
    live = f"{chart}<h3>The largest tensors at the peak</h3>"
    live += _table("largest", largest_table(ledger))
    if times is not None and times.milliseconds:
        note = f" ({_timed(profile)})" if _timed(profile) else ""
        live += f"<h3>Time by layer{note}</h3>{_table('times', layers_table(profile))}"
        live += f"<p class='note'>{speed_text(times)}</p>"
    largest = max(each.bytes.layer(layer) for each in report.profiles for layer in LAYERS)
    at_peak = _layer_bars(ledger, largest) + _table("ledger", ledger_table(ledger))
    sections = _section(f"Where the bytes are at the peak{name}", at_peak)
    sections += _section(f"Live memory over the step{name}", live)
    if ledger.process:
        text = f"<p>{escape(process_sentence(ledger))}</p>" + _table("process", process_table(ledger))
        sections += _section("Where the memory of the process is", text)
    return f'<div class="panel" data-technique="{number}">{sections}</div>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _layer_bars(ledger: Ledger, largest: int) -> str:
    """Returns bars of the bytes at the peak, one per layer; ``largest`` bytes fill the width."""
    rows = []
    sizes, total = ledger.by_layer(), ledger.total
    for layer in ledger.layers:
        size = sizes[layer]
        parts = _parts(layer, {category: ledger.entries.get((category, layer), 0) for category in CATEGORIES})
        rows.append(Bar(layer, parts, f"{format_bytes(size)} · {format_share(size, total)}"))
    return _bars("Bytes at the peak by layer", CATEGORIES, rows, largest)


def _parts(name: str, sizes: Mapping[str, int]) -> list[Part]:
    return [Part(kind, size, f"{name}, {kind}: {format_bytes(size)}") for kind, size in sizes.items() if size]


def _bars(title: str, kinds: Sequence[str], rows: Sequence[Bar], largest: float) -> str:
    """Returns bars with the legend of the kinds that occur; ``largest`` fills the width."""
    read_out = ", ".join(f"{row.label} {row.figure} {row.remark}".strip() for row in rows)
    used = [kind for kind in kinds if any(part.kind == kind for row in rows for part in row.parts)]
    legend = charts.legend(used) if used else ""
    return legend + charts.bars(rows, f"{title}: {read_out}", largest=largest)


def _timeline(ledger: Ledger, before: int | None, largest: int, *, timed: bool) -> str:
    """Returns the chart of live bytes; ``before``: the reference's peak, ``largest``: bytes of the full height."""
    peak = peak_moment(ledger)
    words = f"Live bytes over the step. Peak {format_bytes(peak.bytes)} in the {peak.phase} phase."
    chart = charts.timeline(downsample(ledger.timeline), words, largest=largest, timed=timed, before=before)
    marked = " data-timed" if timed else ""
    slider = (
        f'<label class="moment"{marked}><span>Moment</span>'
        '<input type="range" min="0" max="1000" value="0" step="1"><output></output></label>'
    )
    return charts.legend(PHASES) + chart + slider


def _comparison(profiles: Sequence[Profile]) -> str:
    """Returns the section that compares techniques: stash, peak and speed as bars, and all figures as a table."""
    stashes = [{layer: profile.bytes.stash.get(layer, 0) for layer in _STASH_ORDER} for profile in profiles]
    peaks = [{category: profile.bytes.category(category) for category in CATEGORIES} for profile in profiles]
    content = _technique_bars("Kept for the backward pass, by layer", profiles, stashes)
    content += _technique_bars("Peak of the whole step, by category", profiles, peaks)
    content += _speeds(profiles) + _table("comparison", comparison_table(profiles))
    return _section("Before and after", content)


def _technique_bars(title: str, profiles: Sequence[Profile], sizes: Sequence[Mapping[str, int]]) -> str:
    """Returns a bar of bytes for each technique; ``sizes``: bytes by kind of each."""
    rows = []
    sums = [sum(of_profile.values()) for of_profile in sizes]
    for profile, of_profile, total in zip(profiles, sizes, sums, strict=True):
        name, reference = profile.technique.name, reference_of(profile, profiles)
        change = "" if reference is None else less(sums[profiles.index(reference)], total)
        rows.append(Bar(name, _parts(name, of_profile), format_bytes(total), change))
    return f"<h3>{title}</h3>{_bars(title, list(sizes[0]), rows, max(sums))}"


def _speeds(profiles: Sequence[Profile]) -> str:
    """Returns bars of target tokens per second; empty if no step was timed."""
    rows = []
    for profile in profiles:
        name, speed = profile.technique.name, profile.tokens_per_second
        if speed is not None:
            reference = reference_of(profile, profiles)
            ratio = "" if reference is None else faster_text(reference, profile)
            part = Part("speed", round(speed, 1), f"{name}: {speed:,.0f} target tokens/s")
            rows.append(Bar(name, [part], f"{speed:,.0f}", ratio))
    if not rows:
        return ""
    title = "Target tokens a second" + (f", {_timed(profiles[0])}" if _timed(profiles[0]) else "")
    return f"<h3>{title}</h3>{_bars(title, (), rows, max(row.parts[0].amount for row in rows))}"


def kernel_section(steps: Sequence[KernelTimes]) -> str:
    """Returns the section about the kernels of steps on a GPU; empty if none were measured."""
    if not steps:
        return ""
    classes = f"<h3>Kernels by class</h3>{_table('kernels', classes_table(steps))}"
    return _section("Launches against compute", _table("launches", launches_table(steps)) + classes)


def _provenance(report: Report) -> str:
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    facts = {"command": report.command, **report.machine, "made": made}
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    return f"<section class='made'><h2>How this was made</h2>{notes}<dl>{items}</dl></section>"


def _table(kind: str, table: ReportTable) -> str:
    """Returns a table; a row that begins with text is named by it."""
    top = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    body = []
    for first, *others in filter(None, [*table.rows, table.sums, *table.below]):
        named = f'<th scope="row">{escape(first)}</th>' if isinstance(first, str) else _cell(first)
        body.append(f"<tr>{named}{''.join(map(_cell, others))}</tr>")
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{kind} figures"><table class="{kind}">'
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    return f'<td data-bytes="{cell}">{cell_text(cell) if cell else ""}</td>'
