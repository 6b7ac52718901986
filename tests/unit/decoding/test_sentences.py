"""Where sentences end, and that nothing of a text gets lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from econmt_serve.text.sentences import Splitter, sentence_spans, splitter_for

PARAGRAPH = "Tom bought a new car.|He likes it very much.|His sister wants one, too.|They live in Boston."
TEXTS = [
    ("en", PARAGRAPH),
    ("en", "Mr. Smith paid $3.50 to Dr. J. R. Jones, Ph.D. at 5 p.m. on Jan. 5.|See Fig. 3 and No. 5."),
    ("en", '"Stop!" he said.|"Why?"|She left...|Then nothing.|(He laughed.)|Is it so?!|Yes…|No.'),
    ("en", "The U.S. President came from the U.S.|He went to example.com/a.b today."),
    ("en", "1. First item.|It is 12.|I like it! 😀|He too.|- Yes.|- No."),
    ("en-GB", "He works at Smith & Co. Ltd. in St. Albans, i.e. Not far."),
    ("de", "Am 3. Oktober war der II. Weltkrieg lange vorbei.|Das war 1990.|Er kam z.B. Montag."),
    ("de", "Dr. Müller ging usw.|„Halt!“, rief er.|„Nein.“|Sie ging."),
    ("fr", "M. Dupont est là.|«\u00a0Oui\u00a0!\u00a0»|Il part."),
    ("es", "¡Hola!|¿Qué tal?|El Sr. García vive en EE.UU. desde 1990."),
    ("ar", "اشترى توم سيارة.|هل يحبها؟|نعم."),
    ("ur", "یہ ہے۔|وہ ہے۔"),
    ("hi", "टॉम ने कार खरीदी।|वह खुश है।"),
    ("th", "ทอมซื้อรถ เขาชอบมัน"),
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
    ("vi", "TP. Hồ Chí Minh đẹp.|TS. Nam đến."),
    ("fi", "Hän osti esim. Applen.|Warner Bros. Studio  on."),
]
SPACELESS = [
    ("my", "သူ အိမ်ပြန်သည်။|သူ လာသည်။"),
    ("zh", "他买了一辆新车。|他很喜欢！|“好！”他说。|真的？"),
    ("ja", "彼は車を買った。|「本当？」と聞いた。|はい。"),
]


def pieces(split: Splitter, text: str) -> list[str]:
    return [text[begin:end] for begin, end in split(text)]


@pytest.mark.parametrize(("language", "marked"), [*TEXTS, *SPACELESS])
def test_sentences_end_where_they_should(language: str, marked: str) -> None:
    text = marked.replace("|", "" if (language, marked) in SPACELESS else " ")
    base = language.partition("-")[0]
    assert pieces(lambda text: sentence_spans(text, base), text) == marked.split("|")


@pytest.mark.parametrize("language", ["en", "de", "xx", ""])
def test_the_paragraph_has_four_sentences(language: str) -> None:
    assert pieces(splitter_for(language), PARAGRAPH.replace("|", " ")) == PARAGRAPH.split("|")


@settings(max_examples=150, derandomize=True)
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
