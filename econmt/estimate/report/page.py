"""A report as one HTML page that needs no network and no other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

from econmt.estimate.kernels import KernelTimes
from econmt.estimate.profiling import Profile
from econmt.estimate.report.kernel_tables import classes_table, launches_table
from econmt.estimate.report.report import (
    Report,
    comparison_table,
    faster_text,
    layers_table,
    less,
    ranks_table,
    reference_of,
    size_of,
    speed_text,
)
from econmt_memory.measure.ledger import CATEGORIES
from econmt_memory.report.charts import Bar, bars, escape
from econmt_memory.report.ledger_tables import largest_table, ledger_table
from econmt_memory.report.page import document, html_table, layer_bars, live_chart, section
from econmt_memory.report.tables import format_bytes

_STASH_ORDER = ("attention", "decoder", "encoder", "output", "embedding", "loss", "other")
"""Layers of a comparison's bars: those that usually save most come first, where a difference is seen best."""
_CHECKED = ' checked="checked"'
_TERMS = {
    "reference": "plain PyTorch, in which autograd keeps all feature maps",
    "+ decoder": "the reference, but decoder and attention compute their feature maps again in the backward pass",
    "+ encoder": "the reference, but the encoder computes its feature maps again",
    "+ output": "the reference, but the output layer computes its logits again, chunk by chunk",
    "all": "decoder, attention, encoder and output layer compute theirs again",
    "bfloat16": "matrix products in bfloat16, otherwise in float32",
    "recompute": "in PyTorch, without kernels of econmt's own",
    "compiled": "in PyTorch, with steps that are compiled",
    "feature maps": "results of the forward pass that the backward pass needs",
}
"""Meaning of each part of a technique's name."""


def page(report: Report) -> str:
    """Returns the page's HTML.

    Its sections: headline figures; a comparison if there are several techniques; for each technique the bytes at the
    peak by layer and category, live bytes over the step, and the largest tensors; GPU kernels; and provenance.
    """
    several = len(report.profiles) > 1
    content = []
    if report.ranks:
        ranks = html_table("ranks", ranks_table(report.ranks))
        content.append(section("What each rank holds at its peak", ranks))
    content += [_comparison(report.profiles), _chooser(report.profiles)] if several else []
    content += [_panel(report, number) for number in range(len(report.profiles))]
    content += [kernel_section(report.kernels), _provenance(report)]
    title = f"Memory of a training step: {report.recipe}"
    ledgers = [profile.bytes for profile in report.profiles]
    return document(title, _subtitle(report), _tiles(report), "\n".join(content), ledgers)


def best_of(profiles: Sequence[Profile]) -> Profile:
    """Returns the profile that the headline compares with the reference: the smallest, and of equals the fastest."""
    alike = [each for each in profiles if each.technique.precision == profiles[0].technique.precision]
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
        parts.append(report.profiles[0].technique.precision.name)
    return f"<p class='what'>{' · '.join(parts)}</p><p class='note'>{escape(report.how)}</p>"


def _tiles(report: Report) -> list[tuple[str, str, str]]:
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
        if ratio := faster_text(first, best):
            figures = f"{first.tokens_per_second:,.0f} → {best.tokens_per_second:,.0f} target tokens/s"
            tiles.append((ratio, "the reference's speed", figures))
    return tiles


def _timed(profile: Profile) -> str:
    return "" if profile.timed_shape in (None, profile.shape) else f"measured at {profile.timed_shape}"


def _chooser(profiles: Sequence[Profile]) -> str:
    choices = "".join(
        f'<label><input type="radio" name="technique" value="{number}"{"" if number else _CHECKED} />'
        f"<span>{escape(profile.technique.name)}</span></label>"
        for number, profile in enumerate(profiles)
    )
    return f'<fieldset class="chooser"><legend>Show</legend>{choices}</fieldset>'


def _panel(report: Report, number: int) -> str:
    """Returns the sections of one technique."""
    profile = report.profiles[number]
    ledger, times = profile.bytes, profile.times
    name = f": {escape(profile.technique.name)}" if len(report.profiles) > 1 else ""
    highest = max(each.bytes.peak for each in report.profiles)
    reference = reference_of(profile, report.profiles)
    before = None if reference is None else reference.bytes
    chart = live_chart(ledger, before, highest)
    live = f"{chart}<h3>The largest tensors at the peak</h3>"
    live += html_table("largest", largest_table(ledger))
    if times is not None and times.milliseconds:
        note = f" ({_timed(profile)})" if _timed(profile) else ""
        live += f"<h3>Time by layer{note}</h3>{html_table('times', layers_table(profile))}"
        live += f"<p class='note'>{speed_text(times)}</p>"
    largest = max(size for each in report.profiles for size in each.bytes.by_layer().values())
    at_peak = layer_bars(ledger, largest) + html_table("ledger", ledger_table(ledger))
    sections = section(f"Where the bytes are at the peak{name}", at_peak)
    sections += section(f"Live memory over the step{name}", live)
    return f'<div class="panel" data-technique="{number}">{sections}</div>'


def _terms(profiles: Sequence[Profile]) -> str:
    """Explains the names of techniques, and what the memory of a step consists of."""
    named = {"feature maps", *(part for each in profiles for part in each.technique.name.split(", "))}
    terms = (f"<dt>{name}</dt><dd>{words}</dd>" for name, words in _TERMS.items() if name in named)
    return f'<dl class="terms">{"".join(terms)}</dl>'


def _comparison(profiles: Sequence[Profile]) -> str:
    """Returns the section that compares techniques.

    It has live memory before and after, beside what the names mean; stash, peak and speed as bars; and a table.
    """
    best = best_of(profiles)
    reference = reference_of(best, profiles)
    before = None if reference is None else reference.bytes
    chart = live_chart(best.bytes, before, slider=False)
    title = f"Live memory of a step: {escape(best.technique.name)}, and the reference as a line"
    content = f'<h3>{title}</h3><div class="compared"><div>{chart}</div>{_terms(profiles)}</div>'
    stashes = [{layer: profile.bytes.stash.get(layer, 0) for layer in _STASH_ORDER} for profile in profiles]
    peaks = [{category: profile.bytes.category(category) for category in CATEGORIES} for profile in profiles]
    content += _technique_bars("Kept for the backward pass, by layer", profiles, stashes)
    content += _technique_bars("Peak of the whole step, by category", profiles, peaks)
    content += _speeds(profiles) + html_table("comparison", comparison_table(profiles))
    return section("Before and after", content)


def _technique_bars(title: str, profiles: Sequence[Profile], sizes: Sequence[Mapping[str, int]]) -> str:
    """Returns a bar of bytes for each technique; ``sizes``: bytes by kind of each."""
    rows = []
    sums = [sum(of_profile.values()) for of_profile in sizes]
    for profile, of_profile, total in zip(profiles, sizes, sums, strict=True):
        name, reference = profile.technique.name, reference_of(profile, profiles)
        change = "" if reference is None else less(sums[profiles.index(reference)], total)
        rows.append(Bar(name, of_profile, format_bytes(total), change))
    return f"<h3>{title}</h3>{bars(title, list(sizes[0]), rows, max(sums))}"


def _speeds(profiles: Sequence[Profile]) -> str:
    """Returns bars of target tokens per second; empty if no step was timed."""
    rows = []
    for profile in profiles:
        name, speed = profile.technique.name, profile.tokens_per_second
        if speed is not None:
            reference = reference_of(profile, profiles)
            ratio = "" if reference is None else faster_text(reference, profile)
            words = "{:,.0f} target tokens/s".format
            rows.append(Bar(name, {"speed": round(speed, 1)}, f"{speed:,.0f}", ratio, words))
    if not rows:
        return ""
    title = "Target tokens a second" + (f", {_timed(profiles[0])}" if _timed(profiles[0]) else "")
    return f"<h3>{title}</h3>{bars(title, (), rows, max(row.amounts['speed'] for row in rows))}"


def kernel_section(steps: Sequence[KernelTimes]) -> str:
    """Returns the section about the kernels of steps on a GPU; empty if none were measured."""
    if not steps:
        return ""
    classes = f"<h3>Kernels by class</h3>{html_table('kernels', classes_table(steps))}"
    return section("Launches against compute", html_table("launches", launches_table(steps)) + classes)


def _provenance(report: Report) -> str:
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    facts = {"command": report.command, **report.machine, "made": made}
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    return f"<section class='made'><h2>How this was made</h2>{notes}<dl>{items}</dl></section>"
