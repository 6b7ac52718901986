"""Pages as newspapers, manuals, tables and lists have them come back with all their text and tags."""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import partial
from html.parser import HTMLParser

import pytest

from econmt.decoding.translation import NBestEntry, Translation
from econmt_serve.text.markup_reader import html_passage
from econmt_serve.text.passages import Passage, division
from econmt_serve.text.sentences import sentence_spans

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


def test_a_broken_page_comes_back_as_it_was() -> None:
    # Moved words would change how its open quote is read.
    assert not {"text differs in order", "markup differs in order"} & {
        *problems(BROKEN, html_passage(BROKEN, division(ENGLISH, "de")))
    }
