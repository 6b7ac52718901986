"""Tags and placeholders find their words again, each once and well nested."""

from __future__ import annotations

import re
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from econmt.data.text.vocabulary import SPECIAL_TOKENS, Vocabularies, WordVocabulary
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.translation import EMPTY, NBestEntry, Translation
from econmt.decoding.translator import Translator
from econmt_serve.text.division import divider
from econmt_serve.text.markup import Marked, put_back
from econmt_serve.text.markup_reader import line_passage
from econmt_serve.text.passages import Passage, TextDivision
from tests.unit.decoding.test_translator import Copying

DIVIDE = divider("", split=False, markup=True)


def read(line: str) -> Passage:
    return line_passage(line, TextDivision())


def sentence(line: str) -> Marked:
    (only,) = read(line).sentences
    return only


def translated(
    line: str, translation: str, alignment: list[tuple[int, int]]
) -> tuple[str, list[tuple[int, int]]]:
    """Text and alignment of a line whose only sentence is translated so."""
    entry = NBestEntry(translation, [], [], 0.0, 0.0, None, False, alignment)
    passage, found = read(line), Translation(translation, 0.0, 0.0, [], None, [entry], [])
    whole = passage.joined([found for _ in passage.sentences])
    return whole.text, [pair for each in whole.hypotheses for pair in each.alignment]


def test_lists_of_several_sentences_are_as_long_as_the_longest() -> None:
    """The last hypothesis of a sentence stands for those that it lacks; a sentence without any is empty."""
    passage = read("<p>One.</p> <p>Two.</p> <p>Three.</p>")
    lists = [["a", "b"], [], ["c", "d e", "f"]]

    def entry(at: int, rank: int, text: str) -> NBestEntry:
        return NBestEntry(text, text.split(), [at], -1.0 - rank, -2.0 - rank, None, text == "f")

    translations = [
        EMPTY._replace(hypotheses=[entry(at, *each) for each in enumerate(texts)], source_tokens=[f"s{at}"])
        for at, texts in enumerate(lists)
    ]
    joined = passage.joined(translations)
    assert [(each.text, *each[1:5], each.cut) for each in joined.hypotheses] == [
        ("<p>a</p> <p></p> <p>c</p>", ["a", "c"], [0, 2], -2.0, -4.0, False),
        ("<p>b</p> <p></p> <p>d e</p>", ["b", "d", "e"], [0, 2], -4.0, -6.0, False),
        ("<p>b</p> <p></p> <p>f</p>", ["b", "f"], [0, 2], -5.0, -7.0, True),
    ]
    assert (joined.text, joined.score) == (joined.hypotheses[0].text, -2.0)
    assert joined.source_tokens == ["s0", "s1", "s2"]
    for rank in range(4):
        assert passage.written(translations, rank) == joined.hypotheses[min(rank, 2)].text
    assert passage.joined([EMPTY] * 3) == EMPTY._replace(text="<p></p> <p></p> <p></p>")


def straight(count: int) -> list[tuple[int, int]]:
    return [(word, word) for word in range(count)]


@pytest.mark.parametrize(
    ("line", "text", "translation", "alignment", "expected"),
    [
        ("no tags, a < b", "no tags, a < b", "x", [], "x"),
        ("<b>A dog</b> runs", "A dog runs", "Es läuft ein Hund", [(2, 0), (2, 1), (0, 2), (1, 3)], "Es läuft <b>ein Hund</b>"),
        (
            "<p>A <b>dog</b>. It <i>runs <u>fast</u></i>!</p>",
            "A dog. It runs fast!",
            "Ein Hund. Er läuft schnell!",
            straight(5),
            "<p>Ein <b>Hund</b>. Er <i>läuft <u>schnell</u></i>!</p>",
        ),
        # One word in a row that was made of others does not carry the tag away.
        ("<b>a b c</b> d e", "a b c d e", "A B D C E A", [(0, 0), (1, 1), (3, 2), (2, 3), (4, 4), (0, 5)], "<b>A B</b> D C E A"),
        ("(<b>a</b>) b", "(a) b", "(A) B", straight(2), "(<b>A</b>) B"),
        ("x<x/>y", "x y", "X Y", straight(2), "X<x/>Y"),
        ("Hello {name}!", "Hello !", "Hallo !", straight(2), "Hallo {name}!"),
        ("%s files in ${dir}, %(n)d", "files in ,", "Dateien in ,", straight(3), "%s Dateien in ${dir}, %(n)d"),
        ("%1$.2f of {{ a.b }}, %-5ld", "of ,", "von ,", straight(2), "%1$.2f von {{ a.b }}, %-5ld"),
        ("H<b>2</b>O, 1<b>er</b>", "H2O, 1er", "H2O, 1st", straight(2), "H<b>2</b>O, <b>1st</b>"),
        ("H<b>2</b>O H2<i>O</i>", "H2O H2O", "H2O H2O", straight(2), "H<b>2</b>O H2<i>O</i>"),
        ("w <b>x</b><i></i>y z", "w xy z", "W XY Z", straight(3), "W <b>XY</b><i></i> Z"),
        ("w <i></i><b>x y</b>", "w x y", "W X Y", straight(3), "W <i></i><b>X Y</b>"),
        ("a (<x/>, b) c", "a (, b) c", "A (, B) C", straight(4), "A (<x/>, B) C"),
        ("(<b>a</b>/<i>b</i>/c)", "(a/b/c)", "(A/B/C)", straight(1), "(<b>A/B/C</b><i></i>)"),
        ("a {x}, b", "a , b", "B", [(2, 0)], "{x} B"),
        ("a {x}, b", "a , b", "A B", [(0, 0), (2, 1)], "A {x} B"),
        ("a {x}, b", "a , b", "A, B", [(0, 0), (1, 0), (2, 1)], "A {x}, B"),
        ("a ({x}, b)", "a (, b)", "A B", [(0, 0), (2, 1)], "A {x} B"),
        ("a ({x} b) c", "a ( b) c", "A (B) C", [(0, 0), (2, 1), (3, 2)], "A ({x} B) C"),
        ("a «{x} b» c", "a « b» c", "A „B“ C", [(0, 0), (2, 1), (3, 2)], "A „{x} B“ C"),
        ("a-{x} b", "a- b", "A B", straight(2), "A {x} B"),
        ("a {x}s b", "a s b", "A S B", straight(3), "A {x}S B"),
        ("a un{x} b", "a un b", "A Un B", straight(3), "A Un{x} B"),
        ("a {x}{y}, b", "a , b", "A B", [(0, 0), (2, 1)], "A {x}{y} B"),
        ("a {x}, {y} b", "a , b", "A B", [(0, 0), (2, 1)], "A {x} {y} B"),
        ("a <b>{x}</b>, b", "a , b", "A B", [(0, 0), (2, 1)], "A <b>{x}</b> B"),
        ("a {x}, <b>b</b> c", "a , b c", "A B C", [(0, 0), (2, 1), (3, 2)], "A {x} <b>B</b> C"),
        ("a {x}<b>b</b> c", "a b c", "A B C", straight(3), "A {x}<b>B</b> C"),
        ("a <b>b</b>{x}, c", "a b, c", "A B C", straight(3), "A <b>B</b>{x} C"),
        ("{x}, a", ", a", "A", [(1, 0)], "{x} A"),
        ("{x}, a", ", a", ", A", straight(2), "{x}, A"),
        ("{x}<b>, a</b>", ", a", "A", [(1, 0)], "{x}<b> A</b>"),
        ("a: {x}", "a:", "A", straight(1), "A {x}"),
        ("a:{x}", "a:", "A", straight(1), "A {x}"),
        ("a.{x} B", "a. B", "A. B", straight(2), "A.{x} B"),
        ("See https://x.org/a, or b.", "See , or b.", "Oder B.", [(2, 0), (3, 1)], "https://x.org/a Oder B."),
        ("a (https://x.org/a) b", "a () b", "A () B", straight(3), "A (https://x.org/a) B"),
        ("a <b>tom@x.org</b>; b", "a ; b", "A B", [(0, 0), (2, 1)], "A <b>tom@x.org</b> B"),
        ("<b><i></b>x</i>", "x", "X", straight(1), "<b><i></b>X</i>"),
        ("</b>x <i>", "x", "X", straight(1), "</b>X <i>"),
        ("<1>a</1> <2/> b", "a b", "A B", straight(2), "<1>A</1> <2/> B"),
        ("<b>a</b> b", "a b", "B", [(1, 0)], "<b></b> B"),
        ("<b>a <i>c</i></b>", "a c", "C", [(1, 0)], "<b><i>C</i></b>"),
        ("<!-- a < b > c -->x", "x", "X", straight(1), "<!-- a < b > c -->X"),
        ('<a title="2 > 1 < 3">x</a> y', "x y", "X Y", straight(2), '<a title="2 > 1 < 3">X</a> Y'),
        ("<a title='>' alt=\">\"/>x", "x", "X", straight(1), "<a title='>' alt=\">\"/>X"),
        ("<a title=it's>x</a> isn't", "x isn't", "X isn't", straight(2), "<a title=it's>X</a> isn't"),
    ],
)  # fmt: skip
def test_marks_stand_where_their_words_are(
    line: str, text: str, translation: str, alignment: list[tuple[int, int]], expected: str
) -> None:
    assert sentence(line).text == text
    assert translated(line, translation, alignment)[0] == expected


@pytest.mark.parametrize(
    ("line", "translation", "alignment", "expected"),
    [
        ("a b", "A B", [(0, 0), (1, 1)], ("A B", [(0, 0), (1, 1)])),
        ("<x/> a <i>b</i>", "B A", [(1, 0), (0, 1)], ("<x/> <i>B</i> A", [(2, 1), (1, 2)])),
        ('x <a href="y">b c</a>', "B C X", [(1, 0), (2, 1), (0, 2)], ('<a href="y">B C</a> X', [(2, 1), (3, 2), (0, 3)])),
        ("  x<x/>y z", "Z X Y", [(2, 0), (0, 1), (1, 2)], ("Z X<x/>Y", [(1, 0), (0, 1)])),
        ('H<b class="x">2</b>O it', "It H2O", [(1, 0), (0, 1)], ('It H<b class="x">2</b>O', [(2, 0), (0, 1), (1, 1), (0, 2), (1, 2)])),
    ],
)  # fmt: skip
def test_alignments_are_of_the_words_with_their_marks(
    line: str, translation: str, alignment: list[tuple[int, int]], expected: tuple[str, list[tuple[int, int]]]
) -> None:
    assert translated(line, translation, alignment) == expected


TAG = re.compile(r"<(/?)(\w)>|\{\d\}")


def nested(text: str) -> bool:
    stack = []
    for close, name in ((m[1], m[2]) for m in TAG.finditer(text) if m[2]):
        if close and (not stack or stack.pop() != name):
            return False
        if not close:
            stack.append(name)
    return not stack


@st.composite
def marked_lines(draw: st.DrawFn) -> str:
    words = draw(st.lists(st.sampled_from(["dog", "a", "it,", "(x)", "!"]), min_size=1, max_size=6))

    def level(first: int, last: int, depth: int) -> str:
        parts, at = [], first
        while at < last:
            kind = draw(st.integers(0, 3))
            if kind == 0 and depth < 3:
                end = draw(st.integers(at, last))
                name = draw(st.sampled_from("bui"))
                parts.append(f"<{name}>{level(at, end, depth + 1)}</{name}>")
                at = end + (end == at)
            else:
                parts += [f"{{{draw(st.integers(0, 9))}}}"] * (kind == 1) + [words[at]]
                at += 1
        return draw(st.sampled_from(["", " "])).join(parts)

    return level(0, len(words), 0)


@settings(max_examples=120)
@given(
    marked_lines(), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12), st.integers(0, 7)
)
def test_each_mark_comes_once_and_nested(line: str, alignment: list[tuple[int, int]], length: int) -> None:
    texts = [each.text for each in read(line).sentences]
    assert not TAG.search("".join(texts))
    translation = " ".join(["Wort", "an,", "(z)", "."][i % 4] for i in range(length))
    count = len("".join(texts).split())
    pairs = [(s, t) for s, t in alignment if t < length and s < count]
    found, made = translated(line, translation, pairs)
    assert all(TAG.sub("", found.split(" ")[t]) and TAG.sub("", line.split(" ")[s]) for s, t in made)
    assert bool(made) == bool(pairs and texts)
    assert sorted(m[0] for m in TAG.finditer(found)) == sorted(m[0] for m in TAG.finditer(line))
    assert nested(found)
    plain = translation if texts else TAG.sub("", line)
    assert "".join(TAG.sub("", found).split()) == "".join(plain.split())


def test_any_number_of_marks_and_long_lines_and_lines_through_a_translator() -> None:
    line = "<b>" * 3000 + "x" + "</b>" * 3000
    assert translated(line, "X", [(0, 0)])[0] == line.replace("x", "X")
    assert translated(f"y {line} y", "Y X Y", [(i, i) for i in range(3)])[0].count("<b>") == 3000
    assert sentence("<!--" * 50_000).text == "<!--" * 50_000
    signs = f"{{a}} a{'-' * 100_000}b"
    assert [len(unit.text) for unit in sentence(f"b {signs}").units] == [1, 100_002]
    line = f"a {{a}} {'-' * 100_000}"
    assert len(put_back(sentence(line), f"a {'-' * 100_000}", [(0, 0), (1, 1)])[0]) == len(line)
    found, _ = put_back(sentence("<b>x</b> " * 6000), " ".join("X" * 1000), [(i, i) for i in range(1000)])
    assert found.count("<b>X</b>") == 1000
    assert found.count("<b></b>") == 5000
    options = SearchOptions(beam_size=2, nbest_size=2, markup=True, restore_case=True)
    words = WordVocabulary([*SPECIAL_TOKENS, "ein", "Hund", *map(str, range(24))])
    made = Translator([Copying()], Vocabularies(words, words), options, divide=DIVIDE)
    found = list(made.translate(["<b>ein</b> <i>Hund</i>", "<b></b>", "", "ein Hund"]))
    assert [each.text for each in found] == ["<b>ein</b> <i>Hund</i>", "<b></b>", "", "ein Hund"]
    assert found[0].source_tokens == ["ein", "Hund"]
    assert len(found[0].hypotheses) == 2
    assert "<b>" in found[0].hypotheses[1].text
    alone = next(iter(made.translate(["{a} ein <x/> Hund"])))
    assert (alone.text, alone.hypotheses[0].alignment) == ("{a} ein <x/> Hund", [(1, 1), (3, 3)])
    with pytest.raises(ValueError, match="cannot be combined with markup"):
        SearchOptions(markup=True, attention=False)


@pytest.mark.parametrize("way", ["cut", "skip"])
def test_tags_of_long_lines_are_kept(way: Literal["cut", "skip"]) -> None:
    words = WordVocabulary([*SPECIAL_TOKENS, "ein", "Hund", *map(str, range(24))])
    told: list[str] = []
    options = SearchOptions(beam_size=1, markup=True, max_input_length=2, long_lines=way)
    made = Translator([Copying()], Vocabularies(words, words), options, warn=told.append, divide=DIVIDE)
    (found,) = made.translate(["<b>ein</b> " * 50])
    assert found.text.count("<b>") == found.text.count("</b>") == 50
    assert found.text.count("ein") == (2 if way == "cut" else 0)
    assert "input:1: 199 characters, more than a source of 2 tokens may have" in told[0]
