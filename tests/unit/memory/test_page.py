"""The page is well-formed, stands alone, and shows the figures of the ledgers."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from econmt.engine.precision import NAMED
from econmt.estimate.report.page import best_of, page
from econmt.estimate.report.report import faster
from econmt_memory.measure.ledger import CATEGORIES, LAYERS
from econmt_memory.measure.storages import PHASES
from econmt_memory.report import charts
from econmt_memory.report.charts import Bar, css_class
from econmt_memory.report.page import live_chart
from econmt_memory.report.tables import format_bytes
from tests.unit.memory.samples import make_ledger, make_profile, make_report

Element = dict[str, Any]
LOADING = {"src", "href", "action", "srcset", "data", "poster", "xlink:href"}


class Page:
    """Elements of a page with their attributes and texts; refuses what is not well-formed."""

    def __init__(self, text: str) -> None:
        # Styles and programs are no XML.
        text = re.sub("<(style|script)>.*?</\\1>|<!doctype html>", "", text, flags=re.DOTALL)
        self._root = ET.fromstring(text)

    def find(self, tag: str | None, css: str = "", inside: Element | None = None) -> list[Element]:
        """Elements by tag and class, below another one."""
        root = self._root if inside is None else inside["node"]
        return [
            {"tag": node.tag, "node": node, "text": "".join(node.itertext()), **node.attrib}
            for node in root.iter(tag)
            if css in ("", *node.get("class", "").split())
        ]

    def rows(self, kind: str, inside: Element | None = None) -> list[list[Element]]:
        """The cells of each row of the first table of a kind, without its head."""
        body = self.find("tbody", inside=self.find("table", kind, inside)[0])[0]
        rows = self.find("tr", inside=body)
        return [[*self.find("th", inside=row), *self.find("td", inside=row)] for row in rows]


PROFILES = [make_profile(name, scale) for name, scale in (("reference", 4), ("+ attention", 3), ("all", 1))]
PROFILES.append(make_profile("all, twice", 2, rows=2))


@pytest.fixture(scope="module")
def text() -> str:
    return page(make_report(*PROFILES))


@pytest.fixture(scope="module")
def parsed(text: str) -> Page:
    return Page(text)


def test_stands_alone_and_says_what_it_is(text: str, parsed: Page) -> None:
    assert re.findall(r"https?:|//\w|@import|url\(", text) == []
    for element in parsed.find(None):
        assert not LOADING & set(element), element["tag"]
        assert element["tag"] not in ("link", "iframe", "img", "object", "embed", "base")
    assert len(text) < 200_000
    assert not re.search(r"\$\{?\w", text)
    (html,) = parsed.find("html")
    assert html["lang"] == "en"
    assert parsed.find("title")[0]["text"] == "Memory of a training step: sample"
    names, values = ([each["text"] for each in parsed.find(tag)] for tag in ("dt", "dd"))
    facts = dict(zip(names, values, strict=True))
    told = {"command": "econmt profile sample", "processor": "abacus", "torch": "2.13.0"}
    assert {name: facts[name] for name in told} == told
    header = parsed.find("header")[0]["text"]
    for words in ("sample", "4 sentence pairs, 30 source x 20 target", "1,234 and 56", "counted on fingers"):
        assert words in header


def test_every_panel_shows_its_ledger(parsed: Page) -> None:
    panels = parsed.find("div", "panel")
    assert [panel["data-technique"] for panel in panels] == ["0", "1", "2", "3"]
    for panel, profile in zip(panels, PROFILES, strict=True):
        ledger = profile.bytes
        drawn = Counter[str]()
        for rect in parsed.find("span", "segment", panel):
            drawn[rect["data-kind"]] += int(rect["data-amount"])
        assert drawn == {name: ledger.category(name) for name in CATEGORIES if ledger.category(name)}
        *layers, sums = parsed.rows("ledger", panel)
        for row in layers:
            name = row[0]["text"]
            sizes = [ledger.entries.get((category, name), 0) for category in CATEGORIES]
            assert [int(cell["data-bytes"]) for cell in row[1:-1]] == [*sizes, ledger.by_layer()[name]]
        assert [row[0]["text"] for row in layers] == [name for name in LAYERS if ledger.by_layer()[name]]
        assert int(sums[-2]["data-bytes"]) == ledger.peak == sum(drawn.values())
        (peak,) = parsed.find("circle", "peak", panel)
        assert int(peak["data-bytes"]) == ledger.peak
        assert parsed.find("text", "peak-label", panel)[0]["text"] == f"peak {format_bytes(ledger.peak)}"
        assert len(parsed.find("text", "before-label", panel)) == (profile is not PROFILES[0])


def test_techniques_stand_against_the_reference(parsed: Page) -> None:
    rows = parsed.rows("comparison")
    assert [[cell["text"] for cell in row] for row in rows[:3]] == [
        ["reference", "36.0 MB", "", "35.0 MB", "", "2,000", "", "measured"],
        ["+ attention", "27.0 MB", "1.33x less", "27.0 MB", "1.30x less", "2,667", "1.33x", "measured"],
        ["all", "9.0 MB", "4.00x less", "11.0 MB", "3.18x less", "8,000", "4.00x", "measured"],
    ]
    assert rows[3][-1]["text"] == "estimated"
    (section,) = (s for s in parsed.find("section") if s["text"].startswith("Before and after"))
    drawn = Counter[str]()
    for rect in parsed.find("span", "segment", section):
        drawn[rect["data-kind"]] += float(rect["data-amount"])
    for layer in ("attention", "decoder"):
        assert drawn[layer] == sum(profile.bytes.stash[layer] for profile in PROFILES)
    for category in CATEGORIES:
        assert drawn[category] == sum(profile.bytes.category(category) for profile in PROFILES)
    assert drawn["speed"] == pytest.approx(2000 + 2666.7 + 8000 + 4000)
    figures = [tile["text"] for tile in parsed.find("span", "figure")]
    assert figures == ["4.00x less", "3.18x less", "4.00x"]
    assert [faster(8.0, speed) for speed in (79.9, 80.0)] == ["9.99x", "10.0x"]
    terms = [term["text"] for term in parsed.find("dt", inside=section)]
    assert terms == ["reference", "all", "feature maps"]


def test_live_memory_before_and_after_is_one_plot(parsed: Page) -> None:
    (chart,) = parsed.find("svg", "timeline", parsed.find("div", "compared")[0])
    assert [text["text"] for text in parsed.find("text", "before-label", chart)] == ["reference: 35.0 MB"]
    assert [text["text"] for text in parsed.find("text", "peak-label", chart)] == ["peak 11.0 MB"]
    (outline,) = parsed.find("path", "before", chart)
    assert float(chart["data-span"]) == max(each.bytes.timeline[-1].milliseconds for each in PROFILES)
    assert outline["d"].startswith(f"M{charts.PLOT_LEFT:.1f} ")
    assert outline["d"].count("V") == len(PROFILES[0].bytes.timeline) + 1


def test_one_technique_has_no_comparison() -> None:
    parsed = Page(page(make_report(make_profile("as in the recipe", 2))))
    assert parsed.find("fieldset") == []
    assert parsed.find("table", "comparison") == []
    assert [tile["text"] for tile in parsed.find("span", "figure")] == ["19.0 MB", "18.0 MB", "4,000"]
    assert len(parsed.find("div", "panel")) == 1
    times = [[cell["text"] for cell in row] for row in parsed.rows("times")]
    assert times[0] == ["attention", "12.0 MB", "67 %", "3.0", "4.0", "0.0"]
    assert times[-1] == ["all", "18.0 MB", "100 %", "4.0", "4.0", "2.0"]
    assert parsed.find("table", "process") == []


def test_an_estimate_has_no_times() -> None:
    report = make_report(make_profile("reference", 2, timed=False), make_profile("all", 1, timed=False))
    report.device = "cuda"
    parsed = Page(page(report))
    assert parsed.find("table", "times") == []
    compared = ["all", "9.0 MB", "2.00x less", "11.0 MB", "1.73x less", "estimated"]
    assert [cell["text"] for cell in parsed.rows("comparison")[1]] == compared
    assert "allocations and releases" in parsed.find("svg", "timeline")[0]["text"]
    assert [tile["text"] for tile in parsed.find("span", "figure")] == ["2.00x less", "1.73x less"]
    assert "GPU" in parsed.find("header")[0]["text"]
    # Of a reference with other numbers of changes the outline is as wide.
    ledger, other = (make_ledger(1, timed=False) for _ in range(2))
    other.timeline = [each._replace(milliseconds=3 * each.milliseconds) for each in other.timeline]
    assert live_chart(ledger, other) == live_chart(ledger, ledger)


def test_the_script_gets_the_timelines(parsed: Page) -> None:
    data = json.loads(next(s for s in parsed.find("script") if s.get("id") == "data")["text"])
    for moments, profile in zip(data["moments"], PROFILES, strict=True):
        timeline = profile.bytes.timeline
        assert moments == [
            [each.milliseconds, each.bytes, data["phases"].index(each.phase)] for each in timeline
        ]


def test_can_be_used_without_a_mouse(parsed: Page) -> None:
    labelled = [parsed.find("input", inside=label) for label in parsed.find("label")]
    assert [*chain.from_iterable(labelled)] == parsed.find("input")
    assert len(parsed.find("legend")) == 1
    for chart in (*parsed.find("svg"), *parsed.find("div", "bars")):
        assert chart["role"] == "img"
        assert len(chart["aria-label"]) > 20
    for region in parsed.find("div", "wide"):
        assert (region["tabindex"], region["role"]) == ("0", "region")


def test_the_headline_compares_like_with_like() -> None:
    narrow = make_profile("all, bfloat16", 0)
    narrow.technique = narrow.technique._replace(precision=NAMED["bfloat16"])
    slow, fast = make_profile("all", 1), make_profile("all, compiled", 1)
    fast.times.seconds /= 2
    assert best_of([make_profile("reference", 4), slow, narrow, fast]) is fast


@pytest.mark.parametrize("largest", [1, 7, 10, 11, 999, 1000, 1234.5, 4.99e9, 5e9, 5.01e9])
def test_ticks_are_few_and_round(largest: float) -> None:
    found = charts.ticks(largest)
    assert found[0] == 0.0
    assert found[-2] < largest <= found[-1] * (1 + 1e-9)
    assert 3 <= len(found) <= 7
    assert float(f"{found[1]:.2g}") == pytest.approx(found[1])


def test_a_timeline_is_drawn_to_scale() -> None:
    ledger = make_ledger(2)
    drawn = Page(charts.timeline(ledger.timeline, "words", largest=25_000_000, unit="milliseconds"))
    (peak,) = drawn.find("circle", "peak")
    assert float(peak["cx"]) == pytest.approx(charts.PLOT_LEFT + 0.6 * charts.PLOT_WIDTH, abs=0.1)
    ticks = {t["text"]: float(t["y"]) for t in drawn.find("text", "tick") if "B" in t["text"]}
    share = (ticks["0 B"] - float(peak["cy"])) / (ticks["0 B"] - ticks["25 MB"])
    assert share == pytest.approx(ledger.peak / 25_000_000, abs=1e-3)
    forward = drawn.find("path", "k-forward")[0]["d"]
    assert f"H{charts.PLOT_LEFT + 0.4 * charts.PLOT_WIDTH:.1f}V" in forward  # until the backward pass begins


def test_words_stand_in_a_segment_only_if_they_fit() -> None:
    amounts = {"weights": 900, "gradients": 95, "workspace": 0, "other": 5}
    drawn = Page(charts.bars("words", (), [Bar("layer", amounts, "1.0 kB", "2x")], 1000))
    assert [t["text"] for t in drawn.find("i", "inside")] == ["weights 90 %", "10 %", ""]
    assert drawn.find("b", "remark")[0]["text"] == "2x"
    assert [float(t["style"].split()[1]) for t in drawn.find("span", "segment")] == [0.9, 0.095, 0.005]
    drawn = Page(charts.bars("words", (), [Bar("layer", {"weights": 200, "gradients": 800}, "", "")], 1000))
    assert [t["text"] for t in drawn.find("i", "inside")] == ["20 %", "gradients 80 %"]


@pytest.mark.parametrize("theme", [0, 1])
def test_no_two_things_have_one_colour(theme: int) -> None:
    style = page(make_report(make_profile("reference", 4))).split("</style>")[0]
    block = re.findall(r":root[^{]*{([^}]*)}", style)[theme]
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
    wanted = {css_class(kind)[2:] for kind in (*CATEGORIES, *LAYERS, *PHASES, "speed")}
    assert wanted <= set(colours)
    words = {colours[name] for name in ("ink", "quiet", "accent")}
    assert len({colours[name] for name in wanted} | words) == len(wanted) + len(words)


def test_names_and_commands_are_text_without_control_characters() -> None:
    evil = "<script>alert(1)</script>\x1b]0;x\x07\u202e&amp;'\""
    report = make_report(make_profile(evil, 2), make_profile("all", 1))
    machine = {**report.machine, "processor": evil}
    html = page(replace(report, recipe=evil, command=evil, notes=[evil], how=evil, machine=machine))
    assert "<script>alert" not in html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", html)
    assert "\\x1b]0;x\\x07\\u202e" in html
