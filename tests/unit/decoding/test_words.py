"""What counts as a word, and where an address ends."""

from __future__ import annotations

import pytest

import econmt_runtime.text
from econmt.data.text.words import addresses, has_words

ADDRESSES = [
    ("See https://example.com/a_(b)?x=1&y=2#z. Then", ["https://example.com/a_(b)?x=1&y=2#z"]),
    ("(http://x.org/a), [t](https://x.org/a/)", ["http://x.org/a", "https://x.org/a/"]),
    ("'https://x.com', **https://y.com/**", ["https://x.com", "https://y.com/"]),
    ("见https://x.com/路 谢谢https://x.com查看", ["https://x.com/", "https://x.com"]),
    (
        "https://de.wikipedia.org/wiki/Müller; «www.x.fr»",
        ["https://de.wikipedia.org/wiki/Müller", "www.x.fr"],
    ),
    ("&quot;https://x.com/?a=1&amp;b=2&quot;", ["https://x.com/?a=1&amp;b=2"]),
    ("mail tom@x.org, or mailto:a.b+c@x-y.co.uk.", ["tom@x.org", "mailto:a.b+c@x-y.co.uk"]),
    ("ssh://git@x.com:22/r.git", ["ssh://git@x.com:22/r.git"]),
    ("http:// http://... @tom a@b file.txt awww.x", []),
]


@pytest.mark.parametrize(("text", "expected"), ADDRESSES)
def test_an_address_ends_before_the_punctuation_behind_it(text: str, expected: list[str]) -> None:
    assert [address[0] for address in addresses(text)] == expected
    assert [found[0] for found in econmt_runtime.text._ADDRESS.finditer(text)] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(
            (text, False)
            for text in ("", " ", "3", "1,234.56", "2024-11-29", "---", "$5 – 10 %", "٣٤", "😀", "…")
        ),
        *((text, False) for text in ("https://example.com/a", "tom@x.org", "(www.x.org) 3; tom@x.org.")),
        *(
            (text, True)
            for text in ("a", "3 m", "é", "犬", "კ", "3 https://x.org a", "a tom@x.org", "@tom", "{x}")
        ),
    ],
)
def test_words_are_letters_outside_of_addresses(text: str, expected: bool) -> None:
    assert has_words(text) == expected
    assert econmt_runtime.text.has_words(text) == expected


@pytest.mark.parametrize(
    "piece", ["http://", ".,", "www.", "a@", "http://(", "http://x&", "(a", "a.a", ".c", "(", "&amp;"]
)
def test_long_texts_are_looked_through_in_one_go(piece: str) -> None:
    for text in (f"http://x{piece * 50_000}", f"a@b{piece * 50_000}", piece * 50_000 + "@"):
        assert sum(len(address[0]) for address in addresses(text)) <= len(text)
