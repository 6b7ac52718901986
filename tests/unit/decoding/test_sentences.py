"""Where words, addresses, sentences and paragraphs end, and that nothing of a text gets lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import econmt_runtime.text
from econmt.data.text.vocabulary import SPECIAL_TOKENS, Vocabularies, WordVocabulary
from econmt.data.text.words import addresses, has_words
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.translation import NBestEntry, Translation
from econmt.decoding.translator import Translator
from econmt.errors import InputError
from econmt_serve.text.division import divider
from econmt_serve.text.passages import division, plain_passage
from econmt_serve.text.sentences import Splitter, sentence_spans, splitter_for
from tests.unit.decoding.test_markup_reader import in_capitals
from tests.unit.decoding.test_translator import Copying, data_section

PARAGRAPH = "Tom bought a new car.|He likes it very much.|His sister wants one, too.|They live in Boston."
TEXTS = [
    *((language, PARAGRAPH) for language in ("en", "de", "xx", "")),
    ("en", "Mr. Smith paid $3.50 to Dr. J. R. Jones, Ph.D. at 5 p.m. on Jan. 5.|See Fig. 3 and No. 5."),
    ("en", '"Stop!" he said.|"Why?"|She left...|Then nothing.|(He laughed.)|Is it so?!|Yes…|No.'),
    ("en", "The U.S. President came from the U.S.|He went to example.com/a.b today."),
    ("en", "1. First item.|It is 12.|I like it! 😀|He too.|- Yes.|- No."),
    ("en", "Buy these.|1. Milk.|2. Bread."),
    ("en-GB", "He works at Smith & Co. Ltd. in St. Albans, i.e. Not far."),
    ("DE_at", "Am 3. Oktober war der II. Weltkrieg lange vorbei.|Das war 1990.|Er kam z.B. Montag."),
    ("de", "Dr. Müller ging usw.|„Halt!“, rief er.|„Nein.“|Sie ging."),
    ("FR-ca", "M. Dupont est là.|«\u00a0Oui\u00a0!\u00a0»|Il part."),
    ("es", "¡Hola!|¿Qué tal?|El Sr. García vive en EE.UU. desde 1990."),
    ("ar", "اشترى توم سيارة.|هل يحبها؟|نعم."),
    ("ur", "یہ ہے۔|وہ ہے۔"),
    ("hi", "टॉम ने कार खरीदी।|वह खुश है।"),
    ("th", "ทอมซื้อรถ เขาชอบมัน"),
    ("bo", "ང་བོད་པ་ཡིན།|ཁྱེད་རང་སུ་ཡིན། །|ང་སློབ་གྲྭ་བ་ཡིན༎"),
    ("bn", "কুকুর দৌড়ায়।|বিড়াল ঘুমায়।"),
    ("nqo", "ߥߎߟߎ ߦߋ ߓߏߙߌ ߟߊ߸ ߖߊߞߎߡߊ ߦߋ ߛߎߣߐ߹|ߊ߬"),
    ("mn", "ᠨᠣᠬᠠᠢ ᠪᠠᠢᠨᠠ᠃|ᠮᠤᠤᠷ ᠪᠠᠢᠨᠠ᠃"),
    ("syr", "ܟܠܒܐ ܪܗܛ܀|ܩܛܘ ܕܡܟ܀"),
    ("jv", "ꦱꦼꦒꦮꦺꦴꦤ꧀ꦩ꧀ꦭꦪꦸ꧉|ꦏꦸꦕꦶꦁꦠꦸꦫꦸ꧉"),
    # Letters of Georgian have capitals for whole lines only, so that no letter of a sentence is one.
    ("ka", "თბილისი დედაქალაქია.|ის დიდია!|მე იქ ვცხოვრობ."),
    ("my", "သူ အိမ်၊ ကျောင်းသွားသည်။|သူ ပြန်သည်။"),
    ("km", "ខ្ញុំទៅសាលា។|គាត់ទៅផ្ទះ។"),
    ("am", "እኔ ተማሪ ነኝ።|እሱ አስተማሪ ነው።"),
    ("hy", "Ես ուսանող եմ։|Նա ուսուցիչ է։|և ոչ։".replace("|և", " և")),
    ("sat", "ᱚᱞ ᱢᱮᱱᱟᱜᱼᱟ᱾|ᱱᱚᱶᱟ ᱫᱚ᱿"),
    ("el", "Πού είσαι;|Εδώ είμαι· ναι.|Ο κ. Νίκος."),
    ("he", "שלום.\u200f|מה שלומך?|\u200fטוב."),
    ("en", "He won.|#2 is next.|It costs money.|$5 is enough.|Great!|🇩🇪 won.|@tom is here."),
    ("en", "* Item.|• Next.|**Bold** text.|_So_ it is.|He is **bold.**|No.|€5 or more."),
    ("en", "See no. #2 of approx. $5 in e.g. @tom; it is **here. not** there.|[1] Notes."),
    ("de", "Vgl. Kapitel eins.|Bspw. Autos fahren."),
    ("en", "Approx. $5 is enough.|E.g. Tom came."),
    ("vi", "TP. Hồ Chí Minh đẹp.|TS. Nam đến."),
    ("fi", "Hän osti esim. Applen.|Warner Bros. Studio  on."),
]
SPACELESS = [
    ("my", "သူ အိမ်ပြန်သည်။|သူ လာသည်။"),
    ("zh", "他买了一辆新车。|他很喜欢！|“好！”他说。|真的？"),
    ("ja", "彼は車を買った。|「本当？」と聞いた。|はい。"),
    ("ja", "本当︖|はい︒"),
]


def pieces(split: Splitter, text: str) -> list[str]:
    return [text[begin:end] for begin, end in split(text)]


@pytest.mark.parametrize(("language", "marked"), [*TEXTS, *SPACELESS])
def test_sentences_end_where_they_should(language: str, marked: str) -> None:
    text = marked.replace("|", "" if (language, marked) in SPACELESS else " ")
    assert pieces(splitter_for(language), text) == marked.split("|")


@settings(max_examples=150)
@given(st.text(alphabet="aB .!?…。！”\"'(1\n\u00a0;#$*🇩။ა", max_size=40), st.sampled_from(["en", "el", "zh"]))
def test_only_blanks_lie_between_sentences(text: str, language: str) -> None:
    done = 0
    for begin, end in splitter_for(language)(text):
        assert not text[done:begin].strip()
        assert text[begin:end].strip() == text[begin:end] != ""
        done = end
    assert not text[done:].strip()


@pytest.mark.parametrize(
    "piece", [".", "A. ", "! ", "！", '."', "1. ", " ", "(", "x", "!)\n", "*", ".*", ". *", "; "]
)
def test_long_texts_are_split_in_one_go(piece: str) -> None:
    text = f"{piece * 50_000} End."
    split = splitter_for("en")
    assert "".join("".join(pieces(split, text)).split()) == "".join(text.split())


ADDRESSES = [
    ("See https://example.com/a_(b)?x=1&y=2#z. Then", ["https://example.com/a_(b)?x=1&y=2#z"]),
    ("(http://x.org/a), [t](https://x.org/a/)", ["http://x.org/a", "https://x.org/a/"]),
    ("'https://x.com', **https://y.com/**", ["https://x.com", "https://y.com/"]),
    ("见https://x.com/路 谢谢https://x.com查看", ["https://x.com/", "https://x.com"]),
    ("https://de.wikipedia.org/wiki/Müll; «www.x.fr»", ["https://de.wikipedia.org/wiki/Müll", "www.x.fr"]),
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


LINES = ["A dog. Mr. Smith runs! It is 3.5 m.", "", "A dog."]
WORDS = WordVocabulary([*SPECIAL_TOKENS, "<2de>", "<2zh>", *LINES[0].split()])


def made(target: str = "de", **options: object) -> tuple[Translator, list[str]]:
    said: list[str] = []
    translator = Translator(
        [Copying()],
        Vocabularies(WORDS, WORDS),
        SearchOptions(beam_size=2, split_sentences=True, **options),  # type: ignore[arg-type]
        warn=said.append,
        data=data_section(3, ("en-US", target)),
        divide=divider("en-US", split=True, markup=bool(options.get("markup"))),
    )
    return translator, said


def test_lines_keep_their_sentences_paragraphs_and_addresses() -> None:
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
    (found,) = made()[0].translate([f" <2zh> {LINES[0]}"])
    assert found.text == "<2zh> A dog.<2zh> Mr. Smith runs!<2zh> It is 3.5 m.", "copied with its source"
    lines = ["\t1\t2\u00a0000 ", "https://x.org/a?b=1, tom@x.org", " - - - ", "A dog. 3.7 5. It is"]
    passage = plain_passage("\n".join(lines), division(sentence_spans, "de"))
    kept = ["1\t2\u00a0000", "https://x.org/a?b=1, tom@x.org", "- - -"]
    assert [each.text for each in passage.sentences[:3]] == kept
    assert [each.words for each in passage.sentences[:3]] == [[[0, 1, 2]], [[3], [4]], [[5], [6], [7]]]
    written = "".join(f"{line}\n" for line in lines[:3]).upper()
    assert in_capitals(passage._replace(sentences=passage.sentences[:3], gaps=passage.gaps[:4])) == written
    found = made()[0].translate(lines)
    assert [each.text for each in found] == [line.strip() for line in lines]
    translator, _ = made()
    (found,) = translator.translate(["A https://x.org/a dog. It is tom@x.org m."])
    assert found.text == "A https://x.org/a dog. It is tom@x.org m."
    assert found.hypotheses[0].alignment == [(0, 0), (2, 2), (3, 3), (4, 4), (6, 6)]
    with pytest.raises(ValueError, match="cannot be combined with split_sentences"):
        SearchOptions(split_sentences=True, attention=False)
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


def test_constraints_are_of_one_sentence_and_tags_go_with_sentences() -> None:
    wish = Request("A dog.", avoid=["Smith"])
    assert made()[0].translate_chunk([wish])[0].text == "A dog."
    with pytest.raises(InputError, match="text:4: constraints belong to one sentence, and this line has 3"):
        made()[0].translate_chunk([Request("A"), wish._replace(text=LINES[0])], 3, "text")
    line = "<p>A <b>dog.</b> Mr. Smith <i>runs!</i></p><p><b>It is</b> 3.5 m.</p>"
    (found,) = made(markup=True, nbest_size=2)[0].translate([line])
    assert found.text == line
    assert len(found.hypotheses) == 2
    assert found.hypotheses[0].alignment == [(word, word) for word in range(8)]


@pytest.mark.parametrize("target", ["de", "th", "ja"])
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
