"""A report as one HTML page that needs nothing else: no network, no fonts, no other files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from string import Template

from econmt.memory.measure.kernels import KernelTimes
from econmt.memory.measure.ledger import CATEGORIES, LAYERS, Ledger, Moment
from econmt.memory.measure.tracker import PHASES
from econmt.memory.profiling import Profile
from econmt.memory.report import charts
from econmt.memory.report.charts import Bar, Part, escape
from econmt.memory.report.kernel_tables import LAUNCHES, class_cells, class_columns, launch_cells
from econmt.memory.report.tables import (
    LEAST,
    Report,
    faster,
    format_bytes,
    format_precision,
    format_rate,
    grouped,
    less,
    maker,
    peak_moment,
    process_sentence,
    shape_text,
    size_of,
    thin,
)

_TEMPLATE = Path(__file__).with_name("page.html")
_POINTS = 1400
_NAMED = 10
"""Groups of equal tensors that are named at the peak."""

_STASH_ORDER = ("attention", "decoder", "encoder", "output", "embedding", "loss", "other")
"""The layers, that of the largest savings first, where a difference is best seen."""


def page(report: Report) -> str:
    """The page.

    Sections: the figures in short; if there are several techniques, each against the reference; where the bytes are
    at the peak, by layer and category; live memory over the step with the peak and the largest tensors at it; how all
    that was made.
    """
    several = len(report.profiles) > 1
    content = [_ranks(report.ranks)]
    content += [_comparison(report.profiles), _chooser(report.profiles)] if several else []
    content += [_panel(report, number) for number in range(len(report.profiles))]
    content.append(kernel_section(report.kernels))
    content.append(_provenance(report))
    moments = [
        [
            [round(moment.milliseconds, 3), moment.bytes, PHASES.index(moment.phase)]
            for moment in _moments(profile)
        ]
        for profile in report.profiles
    ]
    data = {"moments": moments, "phases": PHASES, "left": charts.PLOT_LEFT, "width": charts.PLOT_WIDTH}
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"Memory of a training step: {report.recipe}"),
        subtitle=_subtitle(report),
        tiles=_tiles(report),
        content="\n".join(content),
        # "<" cannot be written otherwise without ending the script in some place.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )


def best_of(profiles: Sequence[Profile]) -> Profile:
    """Returns the profile that the headline compares with the reference: the smallest, and of equals the fastest."""
    alike = [each for each in profiles if each.technique.precision == profiles[0].technique.precision]
    return min(alike, key=lambda each: (each.bytes.peak, -(each.tokens_per_second or 0.0)))


# ---------------------------------------------------------------------- the head


def _subtitle(report: Report) -> str:
    where = report.machine.get("GPU") or (
        "GPU" if report.device.startswith("cuda") else report.machine["processor"]
    )
    parts = [
        f"<strong>{escape(report.recipe)}</strong>",
        size_of(report),
        f"vocabulary {' and '.join(f'{size:,}' for size in report.vocabulary)}",
        escape(where),
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


# ---------------------------------------------------------------------- one technique


def _panel(report: Report, number: int) -> str:
    profile = report.profiles[number]
    several = len(report.profiles) > 1
    name = f": {escape(profile.technique.name)}" if several else ""
    ledger = profile.bytes
    return (
        f'<div class="panel" data-technique="{number}">'
        f"<section><h2>Where the bytes are at the peak{name}</h2>"
        f"{_layer_bars(report, ledger)}{_ledger_table(ledger)}</section>"
        f"<section><h2>Live memory over the step{name}</h2>{_timeline(report, number)}"
        f"<h3>The largest tensors at the peak</h3>{_largest(ledger)}{_layer_times(profile)}</section>"
        f"{_process(profile)}</div>"
    )


def _process(profile: Profile) -> str:
    ledger = profile.bytes if profile.times is None else profile.times
    if not ledger.process:
        return ""
    whole = sum(ledger.process.values())
    rows = [
        [part, _cell(size), _text(f"{100 * size / whole:.0f} %")]
        for part, size in sorted(ledger.process.items(), key=lambda item: -item[1])
    ]
    rows.append(["resident set of the process", _cell(whole), _text("100 %")])
    table = _table("process", ["part", "bytes", "share"], rows)
    sentence = escape(process_sentence(ledger))
    return f"<section><h2>Where the memory of the process is</h2><p>{sentence}</p>{table}</section>"


def _layer_bars(report: Report, ledger: Ledger) -> str:
    largest = max(profile.bytes.layer(layer) for profile in report.profiles for layer in LAYERS)
    rows = []
    for layer in LAYERS:
        whole = ledger.layer(layer)
        if not whole:
            continue
        parts = [
            Part(category, ledger.entries[category, layer], f"{layer}, {category}: {format_bytes(size)}")
            for category in CATEGORIES
            if (size := ledger.entries.get((category, layer), 0))
        ]
        rows.append(Bar(layer, parts, f"{format_bytes(whole)} · {100 * whole / (ledger.total or 1):.0f} %"))
    kinds = [category for category in CATEGORIES if ledger.category(category)]
    words = f"Bytes at the peak by layer: {_read_out(rows)}"
    return charts.legend(kinds) + charts.bars(rows, words, largest=largest)


def _ranks(ledgers: Sequence[Ledger]) -> str:
    """Describes the memory of each rank, where they differ."""
    rows = [
        [
            ledger.rank,
            *(_cell(ledger.category(category)) for category in CATEGORIES),
            _cell(ledger.peak),
        ]
        for ledger in ledgers
    ]
    table = _table("ledger", ["rank", *CATEGORIES, "all"], rows)
    return f"<section><h2>What each rank holds at its peak</h2>{table}</section>" if ledgers else ""


def _ledger_table(ledger: Ledger) -> str:
    head = ["layer", *CATEGORIES, "all"]
    layers = [layer for layer in LAYERS if ledger.layer(layer)]
    rows = [
        [
            layer,
            *(_cell(ledger.entries.get((category, layer), 0)) for category in CATEGORIES),
            _cell(ledger.layer(layer)),
        ]
        for layer in layers
    ]
    sums = ["all", *(_cell(ledger.category(category)) for category in CATEGORIES), _cell(ledger.total)]
    return _table("ledger", head, [*rows, sums])


def _cell(size: int) -> str:
    return f'<td data-bytes="{size}">{format_bytes(size) if size else ""}</td>'


def _moments(profile: Profile) -> list[Moment]:
    return thin(profile.bytes.timeline, _POINTS)


def _timeline(report: Report, number: int) -> str:
    profile = report.profiles[number]
    ledger = profile.bytes
    peak = peak_moment(ledger)
    timed = bool(ledger.milliseconds)
    before = report.profiles[0].bytes.peak if number else None
    largest = max(each.bytes.peak for each in report.profiles)
    words = f"Live bytes over the step. Peak {format_bytes(peak.bytes)} in the {peak.phase} phase."
    chart = charts.timeline(_moments(profile), words, largest=largest, timed=timed, before=before)
    marked = " data-timed" if timed else ""
    slider = (
        f'<label class="moment"{marked}><span>Moment</span>'
        '<input type="range" min="0" max="1000" value="0" step="1"><output></output></label>'
    )
    return charts.legend(PHASES) + chart + slider


def _largest(ledger: Ledger) -> str:
    head = ["bytes", "tensors", "shape", "type", "category", "layer", "made by"]
    rows = []
    for tensor, count in grouped(ledger.largest)[:_NAMED]:
        each = f"{count} of {format_bytes(tensor.bytes)}" if count > 1 else "1"
        words = (each, shape_text(tensor.shape), tensor.dtype, tensor.category, tensor.layer)
        rows.append([_cell(count * tensor.bytes), *map(_text, words), _text(maker(tensor))])
    return _table("largest", head, rows)


def _layer_times(profile: Profile) -> str:
    times, ledger = profile.times, profile.bytes
    if times is None or not times.milliseconds:
        return ""
    head = ["layer", "kept for the backward pass", *(f"{phase} ms" for phase in PHASES)]
    rows = []
    for layer in LAYERS:
        spent = [times.milliseconds.get((phase, layer), 0.0) for phase in PHASES]
        if ledger.stash.get(layer) or any(value >= LEAST for value in spent):
            rows.append(
                [layer, _cell(ledger.stash.get(layer, 0)), *(_text(f"{value:,.1f}") for value in spent)]
            )
    rows.append(["all", _cell(ledger.stashed), *(_text(f"{times.phase(phase):,.1f}") for phase in PHASES)])
    speed = ""
    if times.tokens_per_second is not None and times.flops_per_second is not None:
        speed = f"{times.tokens_per_second:,.0f} target tokens/s, {format_rate(times.flops_per_second)}"
        if times.share_of_peak is not None:
            speed += f", {100 * times.share_of_peak:.0f} % of what a large matrix product reaches here"
    note = f" ({_timed(profile)})" if _timed(profile) else ""
    return f"<h3>Time by layer{note}</h3>" + _table("times", head, rows) + f"<p class='note'>{speed}</p>"


# ---------------------------------------------------------------------- several techniques


def _comparison(profiles: Sequence[Profile]) -> str:
    first = profiles[0]
    pieces = ["<section><h2>Before and after</h2>"]

    def stash(profile: Profile, layer: str) -> int:
        return profile.bytes.stash.get(layer, 0)

    def peak(profile: Profile, category: str) -> int:
        return profile.bytes.category(category)

    figures: tuple[tuple[str, Sequence[str], Callable[[Profile, str], int]], ...] = (
        ("Kept for the backward pass, by layer", _STASH_ORDER, stash),
        ("Peak of the whole step, by category", CATEGORIES, peak),
    )
    for title, kinds, size in figures:
        sums = [sum(size(profile, kind) for kind in kinds) for profile in profiles]
        rows = []
        for profile, whole in zip(profiles, sums, strict=True):
            name = profile.technique.name
            parts = [
                Part(kind, size(profile, kind), f"{name}, {kind}: {format_bytes(size(profile, kind))}")
                for kind in kinds
                if size(profile, kind)
            ]
            rows.append(
                Bar(name, parts, format_bytes(whole), "" if profile is first else less(sums[0], whole))
            )
        used = [kind for kind in kinds if any(size(profile, kind) for profile in profiles)]
        chart = charts.bars(rows, f"{title}: {_read_out(rows)}", largest=max(sums), left=270, right=300)
        pieces.append(f"<h3>{title}</h3>{charts.legend(used)}{chart}")
    return "".join(pieces) + _speeds(profiles) + _comparison_table(profiles) + "</section>"


def _speeds(profiles: Sequence[Profile]) -> str:
    """Bars of target tokens a second, or nothing where no step was timed."""
    rows = []
    for profile in profiles:
        speed, before = profile.tokens_per_second, profiles[0].tokens_per_second
        if speed is not None:
            figure = f"{speed:,.0f}"
            ratio = "" if before is None or profile is profiles[0] else faster(before, speed)
            part = Part("speed", round(speed, 1), f"{profile.technique.name}: {figure} target tokens/s")
            rows.append(Bar(profile.technique.name, [part], figure, ratio))
    if not rows:
        return ""
    title = "Target tokens a second" + (f", {_timed(profiles[0])}" if _timed(profiles[0]) else "")
    largest = max(row.parts[0].amount for row in rows)
    chart = charts.bars(rows, f"{title}: {_read_out(rows)}", largest=largest, left=270, right=300)
    return f"<h3>{title}</h3>{chart}"


def _read_out(rows: Iterable[Bar]) -> str:
    return ", ".join(f"{row.label} {row.figure} {row.remark}".strip() for row in rows)


def _comparison_table(profiles: Sequence[Profile]) -> str:
    first = profiles[0]
    timed = any(profile.tokens_per_second is not None for profile in profiles)
    head = ["technique", "stash", "change", "peak", "change"]
    head += ["target tokens/s", "change"] if timed else []
    rows = []
    for profile in profiles:
        same = profile is first
        row = [
            profile.technique.name,
            _cell(profile.bytes.stashed),
            _text("" if same else less(first.bytes.stashed, profile.bytes.stashed)),
            _cell(profile.bytes.peak),
            _text("" if same else less(first.bytes.peak, profile.bytes.peak)),
        ]
        if timed:
            speed, before = profile.tokens_per_second, first.tokens_per_second
            row.append(_text("" if speed is None else f"{speed:,.0f}"))
            row.append(_text("" if same or speed is None or before is None else faster(before, speed)))
        rows.append([*row, _text("measured" if profile.measured else "estimated")])
    return _table("comparison", [*head, "bytes"], rows)


# ---------------------------------------------------------------------- parts


def kernel_section(steps: Sequence[KernelTimes]) -> str:
    """The kernels of steps on a GPU; nothing where none were looked at."""
    if not steps:
        return ""
    launches = [[times.name, *map(_text, launch_cells(times)[1:])] for times in steps]
    classes = [[kind, *map(_text, cells)] for kind, *cells in class_cells(steps)]
    return (
        f"<section><h2>Launches against compute</h2>{_table('launches', LAUNCHES, launches)}"
        f"<h3>Kernels by class</h3>{_table('kernels', class_columns(steps), classes)}</section>"
    )


def _provenance(report: Report) -> str:
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    facts = {"command": report.command, **report.machine, "made": made}
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    return f"<section class='made'><h2>How this was made</h2>{notes}<dl>{items}</dl></section>"


def _text(words: str) -> str:
    return f"<td>{escape(words)}</td>"


def _table(kind: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. A row's cells are elements, but for a first one that is plain text: the head of the row."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = []
    for row in rows:
        cells = [cell if cell.startswith("<td") else f'<th scope="row">{escape(cell)}</th>' for cell in row]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{kind} figures"><table class="{kind}">'
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )
