"""Pages and lines with tags as sentences, and back with all their text and tags."""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import partial
from html import unescape
from html.parser import HTMLParser

import pytest

from econmt.decoding.translation import NBestEntry, Translation
from econmt_serve.text.markup_reader import html_passage, line_passage
from econmt_serve.text.passages import Passage, TextDivision, division
from econmt_serve.text.sentences import sentence_spans

SPLIT = division(sentence_spans, "de")


def translation(text: str) -> Translation:
    """A translation whose words are aligned with the source's in order."""
    pairs = [(word, word) for word in range(len(text.split()))]
    entry = NBestEntry(text, text.split(), [], 0.0, 0.0, None, False, pairs)
    return Translation(text, 0.0, 0.0, text.split(), None, [entry], text.split())


def in_capitals(passage: Passage) -> str:
    return passage.written([translation(each.text.upper()) for each in passage.sentences])


PAGES = [
    ("<p>A <b>dog</b> runs. It <i>barks.</i></p>", ["A dog runs.", "It barks."], "<p>A <b>DOG</b> RUNS. IT <i>BARKS.</i></p>"),
    ("<i>One. Two <b>three</b>.</i> Four.", ["One.", "Two three.", "Four."], "<i>ONE. TWO <b>THREE</b>.</i> FOUR."),
    ("a <i>bc. C</i> dd. <u>E</u>", ["a bc.", "C dd.", "E"], "A <i>BC. C</i> DD. <u>E</u>"),
    ("<p>\n  one\n  two </p>\n", ["one two"], "<p>\n  ONE TWO </p>\n"),
    ("One.\n  Two.", ["One.", "Two."], "ONE.\n  TWO."),
    ("一。<b>二</b>。三。", ["一。", "二。", "三。"], "一。 <b>二</b>。 三。"),
    ("<td>1&nbsp;<b>2</b>&lt;3</td><p>&mdash; <br>a", ["a"], "<td>1&nbsp;<b>2</b>&lt;3</td><p>&mdash; <br>A"),
    ("<code>x</code>, and a <b>dog</b>", [", and a dog"], "<code>x</code>, AND A <b>DOG</b>"),
    ("a https://x.org/?b=1&amp;c=2&nbsp;d", ["a d"], "A https://x.org/?b=1&amp;c=2 D"),
    ("<a href=x>https://x.org/</a> tom@x.org", [], "<a href=x>https://x.org/</a> tom@x.org"),
    ("<ul><li>a<ul><li>b</ul><li>c</ul>", ["a", "b", "c"], "<ul><li>A<ul><li>B</ul><li>C</ul>"),
    ("Use <code>a <b>x</b></code> now", ["Use now"], "USE <code>a <b>x</b></code> NOW"),
    ("Use <code>a now<p>b", ["Use a now", "b"], "USE <code>A NOW<p>B"),
    ('<p translate="no">a <p>b</p></p>c', ["c"], '<p translate="no">a <p>b</p></p>C'),
    ("a <span translate=no>b <span>c</span> d</span> e", ["a e"], "A <span translate=no>b <span>c</span> d</span> E"),
    # A nested element closes inside, also in other letters; one that closes itself or an unclosed one does not.
    ("<svg> <svg/> <SVG>x</svg> y</Svg> z", ["z"], "<svg> <svg/> <SVG>x</svg> y</Svg> Z"),
    ("<i translate=no><i a='/'/><i a=/ >b</i> <img/>c</i> d", ["d"], "<i translate=no><i a='/'/><i a=/ >b</i> <img/>c</i> D"),
    (
        "<code>a<code>b</code> c <code>x<code>y</code>z</code> d",
        ["c z d"],
        "<code>a<code>b</code> C <code>x<code>y</code>Z</code> D",
    ),
    ("a</code> b <code>c</code> d", ["a b d"], "A</code> B <code>c</code> D"),
    ("<code/>a <code>b</code> c", ["a c"], "<code/>A <code>b</code> C"),
    ("<pre>a <code>b</code><pre/></pre>c", ["c"], "<pre>a <code>b</code><pre/></pre>C"),
    ("<script>'<script>'</script>x", ["x"], "<script>'<script>'</script>X"),
    ("<code translate=no/>a <b translate=no/>b", ["a b"], "<code translate=no/>A <b translate=no/>B"),
    ('a <img alt="x > y"> b<wbr>c', ["a bc"], 'A <img alt="x > y"> <wbr>BC'),
    ("a <!-- x --> b<!-->, c<!---> d", ["a b, c d"], "A <!-- x --> B<!-->, C<!---> D"),
    ("<a id=x></a>a <i></i>b<u></u>", ["a b"], "<a id=x></a>A <i></i>B<u></u>"),
    ("a &lt; b &amp; c", ["a < b & c"], "A &lt; B &amp; C"),
    ("Yes.<SUP><a href=n>[1]</a></SUP> B<a href=n><sup>2</sup></a> c", ["Yes.", "B c"], "YES.<SUP><a href=n>[1]</a></SUP> B<a href=n><sup>2</sup></a> C"),
    ("<script>if (a < b) f('<p>x</p>')</script>y", ["y"], "<script>if (a < b) f('<p>x</p>')</script>Y"),
    ("<code>x &lt; <i>y</i></code> z", ["z"], "<code>x &lt; <i>y</i></code> Z"),
    ("<!doctype html><!-- note --><br/>a<hr>b", ["a", "b"], "<!doctype html><!-- note --><br/>A<hr>B"),
    ('<a href="?x=1&amp;y=2" title="a > b">go</a>', ["go"], '<a href="?x=1&amp;y=2" title="a > b">GO</a>'),
    ("a<![foo[x]]>b", ["a b"], "A<![foo[x]]>B"),
    ("a<![CDATA[x > y]]>b", ["a b"], "A<![CDATA[x > y]]>B"),
    ("a<!x y>b</ z>c<?php x ?>d", ["a b c d"], "A<!x y>B</ z>C<?php x ?>D"),
    ("a<![if IE]>b<![endif]>", ["a b"], "A<![if IE]>B<![endif]>"),
    ("a < b and c", ["a < b and c"], "A &lt; B AND C"),
    ("a <b", ["a <b"], "A &lt;B"),
    ("a <!-- b", ["a <!-- b"], "A &lt;!-- B"),
    ('a <b c="d>e', ["a e"], 'A <b c="d>E'),
    ("<SCRIPT>x</Script >y", ["y"], "<SCRIPT>x</Script >Y"),
    ("a<script>x < y", ["a"], "A<script>x < y"),
    ("</P >a</code><code/>b", ["ab"], "</P ></code><code/>AB"),
    ("a&#" + "9" * 5000 + ";", ["a\ufffd"], "A\ufffd"),
    ("a" + " " * 9998 + "b", ["a b"], "A B"),
    ("", [], ""),
    (" <p> </p> ", [], " <p> </p> "),
    # Ends of tags and of kept elements.
    ("<i translate=no>a <i x=<i y></i> b", ["b"], "<i translate=no>a <i x=<i y></i> B"),
    ("<i translate=no>a <I>b</i> c</I > d", ["d"], "<i translate=no>a <I>b</i> c</I > D"),
    ("<i translate=no>a</ix></i> b", ["b"], "<i translate=no>a</ix></i> B"),
    ("<a x='> \" b <i>c</i> d", ['" b c d'], "<a x='> \" B <i>C</i> D"),
    ("<a x=\"'>'\" b'>c", ["'\" b'>c"], "<a x=\"'>'\" B'&gt;C"),
    # Names of tags in capitals, void elements with and without a slash, empty pairs; what shows nothing parts no word.
    ("<P><B>Tea</B>pot<BR>now?</p>", ["Teapot", "now?"], "<P><B>TEAPOT</B><BR>NOW?</p>"),
    ("<p>see <img> <b>me</b> <u>and <a href='#'>you</a></u></p>", ["see me and you"], "<p>SEE <img> <b>ME</b> <u>AND <a href='#'>YOU</a></u></p>"),
    ("<p>see<img/>me", ["see me"], "<p>SEE<img/>ME"),
    ("<p>see <br></p>", ["see"], "<p>SEE <br></p>"),
    ("<p>see <img id=a><i id=b><u></u><b></b><img>me</i></p>", ["see me"], "<p>SEE <img id=a><i id=b><u></u><b></b><img>ME</i></p>"),
    ("<p><b>One!</b> Or <img> <b>two <u>at once?</u></b> No.", ["One!", "Or two at once?", "No."], "<p><b>ONE!</b> OR <img> <b>TWO <u>AT ONCE?</u></b> NO."),
    ("say hel<WBR>lo to&shy;day", ["say hello today"], "SAY <WBR>HELLO TODAY"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "sentences", "expected"), PAGES)
def test_html_is_translated_between_its_tags(page: str, sentences: list[str], expected: str) -> None:
    passage = html_passage(page, SPLIT)
    assert [each.text for each in passage.sentences] == sentences
    assert in_capitals(passage) == expected


CAR = "<p>We <b>love</b> to <u>ride</u> our bikes."
EXAMPLES = [
    # Without an alignment tags stay, but not at words; pairs whose words are not translated are empty.
    ("<p>so <b>far</b></p>\n", "so weit", [], "<p>so weit <b></b></p>\n"),
    ("<p>so <b>far &amp; near!</b></p>", "so weit & nah!", [(0, 0), (1, 1), (2, 2), (3, 3)], "<p>so <b>weit &amp; nah!</b></p>"),
    (CAR, "Wir fahren gern unsere Räder.", [(0, 0), (3, 1), (1, 2), (2, 2), (4, 3), (5, 4)], "<p>Wir <u>fahren</u> <b>gern</b> unsere Räder."),
    (CAR, "Rádi tu jezdíme.", [(0, 0), (2, 1), (5, 2)], "<p>Rádi <b></b> tu <u></u> jezdíme."),
    ("re<u>dis</u>cover", "neu entdecken", [(0, 0), (0, 1)], "<u>neu entdecken</u>"),
    ("say <b>hel<!-- <i> --><wbr/>lo</b> to", "sag hallo zu", [(0, 0), (1, 1), (2, 2)], "sag <b><!-- <i> --><wbr/>hallo</b> zu"),
    ("a <var><var>&amp;</var></var> b", "B A", [(0, 1), (1, 0)], "<var><var>&amp;</var></var> B A"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "text", "pairs", "expected"), EXAMPLES)
def test_tags_of_a_page_stand_at_their_words(
    page: str, text: str, pairs: list[tuple[int, int]], expected: str
) -> None:
    passage, entry = html_passage(page, SPLIT), NBestEntry(text, [], [], 0.0, 0.0, None, False, pairs)
    assert passage.written([Translation(text, 0.0, 0.0, [], None, [entry], [])]) == expected
    assert problems(page, passage) == []


def test_no_tag_is_written_and_broken_pages_come_back() -> None:
    for page in ("<p>a</p>", "<p>a <b>b</b></p>"):
        passage = html_passage(page, SPLIT)
        assert "&lt;script&gt;&amp;" in passage.written([translation("<script>& b")])
    names = [f"x{number}" for number in range(5_000)]
    page = "".join(f"<{name} translate=no>" for name in names)
    assert in_capitals(html_passage(f"{page}a", SPLIT)) == f"{page}A"
    page = "".join(f"<{name} translate=no>a<{name}></{name}>" for name in names)
    assert [each.text for each in html_passage(f"{page}b", SPLIT).sentences] == ["b"]
    # Moved words would change how its open quote is read.
    assert not {"text differs in order", "markup differs in order"} & {
        *problems(BROKEN, html_passage(BROKEN, division(ENGLISH, "de")))
    }


PIECES = [
    "A www.x.org. ", "A. {x} ", "A.<wbr> B", "\n", "<p>", "<a \"<b ' \" ' ' ", "<", "<a", "<!--", "<![CDATA[", '<a "',
    "<a '\">", "</", "a ", "<code>", "<script>", "<i>", "</i>", "{", "<b translate=no>", "<code></code><code>",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("read", [html_passage, line_passage])
def test_no_page_is_read_more_than_a_few_times_over(piece: str, read: object) -> None:
    page = piece * (20_000 // len(piece))
    passage = (html_passage if read is html_passage else line_passage)(page, TextDivision())
    written = passage.written([translation(each.text) for each in passage.sentences])
    assert unescape(written).split() == page.split()


NEWS = """<!DOCTYPE html>
<html lang="en"><head><meta charset=utf-8><title>Storm closes ports &amp; roads | The Herald</title>
<style>p > a { color: red }</style><script type="application/ld+json">{"@type": "NewsArticle", "x": "<p>no</p>"}</script>
</head><body class="article"><!-- ad: <b>none</b> --><header><a href="/?a=1&b=2" title='Home > "News"'>The&nbsp;Herald</a></header>
<article><h1>Storm closes <em>all</em> ports</h1><p class=byline>By <a rel="author" href="/j">J. R. Smith</a>, Jan. 5, 2024</p>
<p><strong>A storm hit the coast on Friday.</strong> "We waited," said <a href="/mayor">Mayor Ann O’Neil</a>. "Then
it came." More than 1,500 people left; <i>The Herald</i>’s count was 2,000 (<a href="#n1"><sup>1</sup></a>).
<figure><img src="a.jpg" alt="Waves > 5 m"><figcaption>Waves. <small>Photo: A. Lee</small></figcaption></figure>
<p>Roads reopened at 5 p.m.<br>Ports did <b>not</b>.</p><aside><p>Read <a href=x>more</a>: <em>here</em>.</aside></article>
<footer>&copy; 2024 &lt;The Herald&gt; &mdash; All rights reserved.</footer></body></html>"""
MANUAL = """<h2 id="opt">Options</h2><p>Use <code>cp -r <var>from</var></code> to copy (<kbd>Ctrl</kbd>+<kbd>C</kbd> stops it).
See <a href="#x"><code>mv</code></a>, e.g. for <samp>a.txt</samp>.</p><dl><dt><code>-v</code><dd>Says <em>what</em> it does.
<dt><code>--n</code>=<var>N</var><dd>At most <var>N</var> files. The default is 5.</dl>
<pre>$ cp a b   # <b>copies</b>
  done.</pre><p>Note: <span translate="no">econmt <b>serve</b></span> is a server.</p><textarea>keep <p> this</textarea>"""
TABLE = """<table><caption>Prices of <b>2024</b></caption><colgroup><col span=2></colgroup><thead><tr><th>Item<th>Price
</thead><tbody><tr><td>Red <i>car</i></td><td>1,000.50</td></tr><tr><td rowspan="2">Two words<br>two lines</td><td>&nbsp;</td>
<td><table><tr><td>inner</td></tr></table></td></tr></tbody></table>"""
LISTS = """<ul>\n  <li>One\n    <ol start=3><li>Two <b>words</b>. Two sentences.<li><p>Three</p>
<ul><li><a href="?q=a'b">Four</a>, five</ul></ol>\n  </li>\n  <li>Six <!-- not --> seven\n</ul>"""
BROKEN = """<p>Unclosed <b>bold <i>and</b> italics</i> <a href="x>y <p>quote" next</a> 3 < 4 & 5 > 2 &unknown; <1> </p></div>"""


ENGLISH = partial(sentence_spans, language="en")


class Contents(HTMLParser):
    """Text and markup of a page, as the standard library reads them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self._texts, self.markup = list[str](), list[str]()
        self.feed(page)
        self.close()

    @property
    def characters(self) -> str:
        """The text without any white space, in NFC as models read it."""
        return "".join(unicodedata.normalize("NFC", "".join(self._texts)).split())

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.markup.append(self.get_starttag_text() or tag)

    def handle_endtag(self, tag: str) -> None:
        self.markup.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self._texts.append(data)

    def _keep(self, data: str) -> None:
        self.markup.append(data)

    handle_comment = handle_decl = unknown_decl = handle_pi = _keep


def reordered(text: str, *, reverse: bool) -> Translation:
    """Returns a text as its own translation, with its words in order or in reverse, and the alignment."""
    words = text.split()
    order = range(len(words))[:: -1 if reverse else 1]
    made = " ".join(words[number] for number in order)
    entry = NBestEntry(made, [], [], 0.0, 0.0, None, False, list(zip(order, range(len(words)), strict=True)))
    return Translation(made, 0.0, 0.0, [], None, [entry], [])


def problems(page: str, passage: Passage) -> list[str]:
    """Returns what is missing or out of order in a page after each of the two translations."""
    before = Contents(page)
    told = []
    for reverse in (False, True):
        texts = [reordered(each.text, reverse=reverse) for each in passage.sentences]
        after = Contents(passage.written(texts))
        way = "in reverse" if reverse else "in order"
        if reverse:
            same = (
                Counter(before.characters) == Counter(after.characters),
                Counter(before.markup) == Counter(after.markup),
            )
        else:
            same = before.characters == after.characters, before.markup == after.markup
        told += [
            f"{what} differs {way}" for what, fine in zip(("text", "markup"), same, strict=True) if not fine
        ]
    return told


@pytest.mark.parametrize("page", [NEWS, MANUAL, TABLE, LISTS], ids=["news", "manual", "table", "lists"])
@pytest.mark.parametrize("target", ["de", "zh"])
def test_text_and_tags_come_back_in_order(page: str, target: str) -> None:
    assert problems(page, html_passage(page, division(ENGLISH, target))) == []
