"""Sentences out of texts and back into them."""

from __future__ import annotations

from html import unescape

import pytest

from econmt.decoding.requests import Request
from econmt.serving.markup import html_text, plain_text


def test_lines_come_back_with_their_ends() -> None:
    text = plain_text(Request("a\n\r\nb\n", avoid=["x"]))
    assert [line.text for line in text.lines] == ["a", "", "b", ""]
    assert {tuple(line.avoid) for line in text.lines} == {("x",)}
    assert text.written([line.text.upper() for line in text.lines]) == "A\n\nB\n"


PAGES = [
    ("plain", ["plain"], "PLAIN"),
    ("<p>one <b>two</b>!</p>", ["one", "two", "!"], "<p>ONE <b>TWO</b>!</p>"),
    ("<p>\n  one\n  two </p>\n", ["one two"], "<p>\n  ONE TWO </p>\n"),
    ("a &lt; b &amp; c", ["a < b & c"], "A &lt; B &amp; C"),
    ("<script>if (a < b) f('<p>x</p>')</script>y", ["y"], "<script>if (a < b) f('<p>x</p>')</script>Y"),
    ("<code>x &lt; <i>y</i></code> z", ["z"], "<code>x &lt; <i>y</i></code> Z"),
    ("<!doctype html><!-- note --><br/>a<hr>b", ["a", "b"], "<!doctype html><!-- note --><br/>A<hr>B"),
    ('<a href="?x=1&amp;y=2" title="a > b">go</a>', ["go"], '<a href="?x=1&amp;y=2" title="a > b">GO</a>'),
    ("</p>unmatched</div>", ["unmatched"], "</p>UNMATCHED</div>"),
    ("a<![foo[x]]>b", ["a", "b"], "A<![foo[x]]>B"),
    ("a<![ >b", ["a", "b"], "A<![ >B"),
    ("a<![CDATA[x > y]]>b", ["a", "b"], "A<![CDATA[x > y]]>B"),
    ("a<!x y>b</ z>c<?php x ?>d", ["a", "b", "c", "d"], "A<!x y>B</ z>C<?php x ?>D"),
    ("a<![if IE]>b<![endif]>", ["a", "b"], "A<![if IE]>B<![endif]>"),
    ("a < b and c", ["a < b and c"], "A &lt; B AND C"),
    ("a <b", ["a <b"], "A &lt;B"),
    ("a <!-- b", ["a <!-- b"], "A &lt;!-- B"),
    ('a <b c="d>e', ["a", "e"], 'A <b c="d>E'),
    ("<SCRIPT>x</Script >y", ["y"], "<SCRIPT>x</Script >Y"),
    ("a<script>x < y", ["a"], "A<script>x < y"),
    ("</P >a</code><code/>b", ["a", "b"], "</P >A</code><code/>B"),
    ("<p>&nbsp;</p>a", ["a"], "<p>&nbsp;</p>A"),
    ("&#" + "9" * 5000 + ";", ["\ufffd"], "\ufffd"),
    ("a" + " " * 9998 + "b", ["a b"], "A B"),
    ("", [], ""),
    (" <p> </p> ", [], " <p> </p> "),
]


@pytest.mark.parametrize(("page", "sentences", "expected"), PAGES)
def test_html_is_translated_between_its_tags(page: str, sentences: list[str], expected: str) -> None:
    text = html_text(Request(page))
    assert [line.text for line in text.lines] == sentences
    assert text.written([sentence.upper() for sentence in sentences]) == expected


def test_a_translation_can_write_no_tag() -> None:
    assert html_text(Request("<p>a</p>")).written(["<script>&"]) == "<p>&lt;script&gt;&amp;</p>"


@pytest.mark.parametrize(
    "piece", ["<", "<a", "<!--", "<![CDATA[", '<a "', "<a '\">", "</", "a ", "<code>", "<script>"]
)
def test_no_page_is_read_more_than_a_few_times_over(piece: str) -> None:
    page = piece * (10_000 // len(piece))
    text = html_text(Request(page))
    assert unescape(text.written([line.text for line in text.lines])).split() == page.split()
