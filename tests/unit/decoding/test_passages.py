"""Paragraphs are split, translated and put together; lines, blanks and tags stay."""

from __future__ import annotations

import pytest

from econmt.data.text.vocabulary import SPECIAL_TOKENS, Vocabularies, WordVocabulary
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.translation import NBestEntry, Translation
from econmt.decoding.translator import Translator
from econmt.errors import InputError
from econmt_serve.text.division import divider
from econmt_serve.text.passages import division, plain_passage
from econmt_serve.text.sentences import sentence_spans
from tests.unit.decoding.test_markup_reader import in_capitals
from tests.unit.decoding.test_translator import Copying, data_section

WORDS = WordVocabulary([*SPECIAL_TOKENS, "A", "dog.", "Mr.", "Smith", "runs!", "It", "is", "3.5", "m."])


def made(target: str = "de", **options: object) -> tuple[Translator, list[str]]:
    said: list[str] = []
    translator = Translator(
        [Copying()],
        Vocabularies(WORDS, WORDS),
        SearchOptions(beam_size=2, split_sentences=True, **options),  # type: ignore[arg-type]
        warn=said.append,
        data=data_section(3),
        divide=divider(("en-US", target), split=True, markup=bool(options.get("markup"))),
    )
    return translator, said


LINES = ["A dog. Mr. Smith runs! It is 3.5 m.", "", "A dog."]


def test_lines_keep_their_sentences() -> None:
    translator, said = made()
    done: list[int] = []
    found = translator.translate_chunk(LINES, 5, "text", done.append)
    assert [each.text for each in found] == LINES
    assert (sum(done), found[1].tokens) == (3, [])
    assert found[0].tokens == LINES[0].split()
    assert found[0].hypotheses[0].alignment == [(word, word) for word in range(9)]
    assert found[0].log_probability == pytest.approx(-0.1 * 12)
    assert len(said) == 1
    assert said[0].startswith("text:5: 4 source tokens"), "of the line, not of the sentence"
    (found,) = made("zh")[0].translate([LINES[0]])
    assert found.text == "A dog.Mr. Smith runs!It is 3.5 m."


def test_paragraphs_without_words_are_sentences_as_they_are_written() -> None:
    lines = ["\t1\t2\u00a0000 ", "https://x.org/a?b=1, tom@x.org", " - - - ", "A dog. 3.7 5. It is"]
    how = division(sentence_spans, "de")
    passage = plain_passage("\n".join(lines), how)
    kept = ["1\t2\u00a0000", "https://x.org/a?b=1, tom@x.org", "- - -"]
    assert [each.text for each in passage.sentences[:3]] == kept
    assert [each.words for each in passage.sentences[:3]] == [[[0, 1, 2]], [[3], [4]], [[5], [6], [7]]]
    assert in_capitals(passage._replace(sentences=passage.sentences[:3], gaps=passage.gaps[:4])) == (
        "\n".join(lines[:3]).replace("https://x.org/a?b=1, tom@x.org", "HTTPS://X.ORG/A?B=1, TOM@X.ORG")
        + "\n"
    )
    found = made()[0].translate(lines)
    assert [each.text for each in found] == [line.strip() for line in lines]


def test_addresses_are_put_back_by_alignment() -> None:
    translator, _ = made()
    (found,) = translator.translate(["A https://x.org/a dog. It is tom@x.org m."])
    assert found.text == "A https://x.org/a dog. It is tom@x.org m."
    assert found.hypotheses[0].alignment == [(0, 0), (2, 2), (3, 3), (4, 4), (6, 6)]
    with pytest.raises(ValueError, match="cannot be combined with split_sentences"):
        SearchOptions(split_sentences=True, attention=False)


def test_an_address_ends_a_word_only_between_letters() -> None:
    how = division(sentence_spans, "de")
    texts = ["见https://x.com/谢谢", "见https://x.com/。", "。https://x.com/谢谢"]
    found = [plain_passage(text, how).sentences for text in texts]
    texts = [[each.text for each in sentences] for sentences in found]
    assert texts == [["见 谢谢"], ["见。"], ["。", "谢谢"]]


@pytest.mark.parametrize("cut", [(True, False), (False, True), (False, False)])
def test_a_line_is_cut_if_one_of_its_sentences_is(cut: tuple[bool, bool]) -> None:
    passage = plain_passage("A dog. It runs!", division(sentence_spans, "de"))
    entries = [
        NBestEntry(each.text, [], [], 0.0, 0.0, None, is_cut)
        for each, is_cut in zip(passage.sentences, cut, strict=True)
    ]
    joined = passage.joined([Translation(each.text, 0.0, 0.0, [], None, [each], []) for each in entries])
    assert joined.hypotheses[0].cut == any(cut)


def test_constraints_are_of_one_sentence() -> None:
    wish = Request("A dog.", avoid=["Smith"])
    assert made()[0].translate_chunk([wish])[0].text == "A dog."
    with pytest.raises(InputError, match="text:4: constraints belong to one sentence, and this line has 3"):
        made()[0].translate_chunk([Request("A"), wish._replace(text=LINES[0])], 3, "text")


def test_tags_and_sentences_together() -> None:
    line = "<p>A <b>dog.</b> Mr. Smith <i>runs!</i></p><p><b>It is</b> 3.5 m.</p>"
    (found,) = made(markup=True, nbest_size=2)[0].translate([line])
    assert found.text == line
    assert len(found.hypotheses) == 2
    assert found.hypotheses[0].alignment == [(word, word) for word in range(8)]


@pytest.mark.parametrize("target", ["de", "ja"])
def test_lines_blanks_and_separators_come_back(target: str) -> None:
    how = division(sentence_spans, target)
    text = " One.  Two.\n\n\tThree\r\n  \nFour. Five.\u00a0Six.\n"
    passage = plain_passage(text, how)
    assert [each.text for each in passage.sentences] == ["One.", "Two.", "Three", "Four.", "Five.", "Six."]
    assert passage.lines == [0, 0, 2, 4, 4, 4]
    assert passage.line_count == 6
    expected = text.upper()
    if target == "ja":
        expected = " ONE.TWO.\n\n\tTHREE\r\n  \nFOUR.FIVE.SIX.\n"
    assert in_capitals(passage) == expected


def test_languages_without_blanks_get_them() -> None:
    assert in_capitals(plain_passage("一。二！三", division(sentence_spans, "en"))) == "一。 二！ 三"
    assert in_capitals(plain_passage("一。二！三", division(sentence_spans, "zh"))) == "一。二！三"
