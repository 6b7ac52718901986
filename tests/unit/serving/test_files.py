"""Text, HTML and Word documents there and back, and files that are refused."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from econmt.api import TrainedModel
from econmt_serve import docx, encodings
from econmt_serve.access import Keys
from econmt_serve.docx import WordDocument
from econmt_serve.files import WORD, read_file
from econmt_serve.settings import Refused, Settings
from econmt_serve.text.markup import Marked
from econmt_serve.text.passages import Hypothesis, TextDivision, division
from econmt_serve.text.sentences import sentence_spans
from tests.unit.serving.conftest import Answer, Client, form, serving

HEAD = (
    '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\r\n<w:document xmlns:w="http://schemas.openxmlformats.org'
    '/wordprocessingml/2006/main" xmlns:w14="x" mc:Ignorable="w14" xmlns:mc="y"><w:body>'
)
BODY = (
    '<w:p w:rsidR="1"><w:pPr><w:rPr><w:b/></w:rPr></w:pPr><w:r><w:t xml:space="preserve">Tom is </w:t></w:r>'
    "<w:r><w:rPr><w:b/></w:rPr><w:t>my &amp; yo</w:t></w:r><w:r><w:rPr><w:b/></w:rPr><w:t>ur</w:t></w:r>"
    "<w:r><w:t> dog. He barks.</w:t></w:r></w:p><!-- kept --><w:p/>"
    "<w:p><w:r><w:t>left</w:t><w:tab/><w:t>right </w:t></w:r>"
    '<w:hyperlink r:id="4" xmlns:r="z"><w:r><w:t>link</w:t></w:r></w:hyperlink></w:p>'
    "<w:tbl><w:tr><w:tc><w:p><w:r><w:drawing><w:txbxContent><w:p><w:r><w:t>box</w:t></w:r></w:p></w:txbxContent>"
    "</w:drawing><w:t>cell</w:t><w:instrText>PAGE</w:instrText></w:r></w:p></w:tc></w:tr></w:tbl>"
)
TAIL = "</w:body></w:document>"
SPLIT = division(sentence_spans, "de")


def same(text: str) -> Hypothesis:
    """A translation aligned word by word."""
    return text, [(number, number) for number in range(len(text.split()))]


def document(body: str = BODY, head: str = HEAD, name: str = "document", **parts: bytes) -> bytes:
    output, codec = io.BytesIO(), "latin-1" if "ISO-" in head else "utf-8"
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("word/media/image1.png", bytes(range(256)))
        for each, content in {name: (head + body + TAIL).encode(codec), **parts}.items():
            archive.writestr(f"word/{each}.xml", content)
    return output.getvalue()


def part(content: bytes, name: str = "document.xml") -> str:
    """A part of a document."""
    return zipfile.ZipFile(io.BytesIO(content)).read(f"word/{name}").decode()


def texts_in(xml: str) -> list[str]:
    return re.findall("<w:t[^>]*>([^<]*)</w:t>", xml)


def sentences_of(*arguments: Any) -> list[str]:
    return [each.text for each in read_file(*arguments).sentences]


def test_a_document_keeps_all_but_its_text() -> None:
    header = (HEAD + "<w:p><w:r><w:t>top</w:t></w:r></w:p>" + TAIL).encode()
    read = WordDocument(document(header1=header), SPLIT)
    texts = [each.text for each in read.sentences]
    assert texts == ["Tom is my & your dog.", "He barks.", "left", "right link", "box", "cell", "top"]
    content, kind = read.written([same(text.upper()) for text in texts])
    assert kind == WORD
    written = zipfile.ZipFile(io.BytesIO(content))
    assert written.testzip() is None
    assert written.namelist()[1:] == ["word/media/image1.png", "word/document.xml", "word/header1.xml"]
    assert written.read("word/media/image1.png") == bytes(range(256))
    assert ">TOP<" in part(content, "header1.xml")
    xml = part(content)
    sentence = ["TOM IS ", "MY &amp; YOUR", "", " DOG. HE BARKS."]
    assert texts_in(xml) == [*sentence, "LEFT", "RIGHT ", "LINK", "BOX", "CELL"]
    without = re.compile("<w:t(?: [^>]*)?>[^<]*</w:t>")
    assert without.sub("T", xml) == without.sub("T", HEAD + BODY + TAIL)


@pytest.mark.parametrize("element", ["tab", "ptab", "br", "cr"])
def test_a_line_ends_at_breaks_within_runs_alone(element: str) -> None:
    body = f"<w:p><w:pPr><w:tabs><w:{element}/></w:tabs></w:pPr><w:r><w:t>a dog</w:t><w:{element}/><w:t>runs</w:t></w:r></w:p>"
    assert [each.text for each in WordDocument(document(body), SPLIT).sentences] == ["a dog", "runs"]


def test_fields_formulas_and_numbers_of_notes_stay_between_their_words() -> None:
    words = "<w:t>AN E</w:t><w:noBreakHyphen/><w:t>MAIL</w:t><w:footnoteReference/><w:t> ON</w:t>"
    field = "</w:r><n:oMath xmlns:n='n'/><w:r><w:t> PAGE </w:t><w:fldChar/><w:instrText>PAGE</w:instrText><w:fldChar/><w:t>7</w:t><w:fldChar/>"
    strict = re.sub("schemas.*?/2006", "purl.oclc.org/ooxml/wordprocessingml", HEAD)
    read = WordDocument(document(f"<w:p><w:r>{words}{field}</w:r></w:p>", strict, "document2"), SPLIT)
    assert [each.text for each in read.sentences] == ["AN E-MAIL ON PAGE 7"]
    written, _ = read.written([same("EINE E-MAIL AUF PAGE 7")])
    shown = re.sub("</?w:t(?: [^>]*)?>", "", part(written, "document2.xml"))
    assert f"<w:r>EINE E-MAIL<w:footnoteReference/> AUF{re.sub('</?w:t>', '', field)}</w:r>" in shown


def test_a_hyphen_may_be_the_whole_of_a_run() -> None:
    hyphens = "<w:r><w:noBreakHyphen/></w:r><w:r><w:noBreakHyphen></w:noBreakHyphen><w:t>b/></w:t></w:r>"
    read = WordDocument(document(f"<w:p><w:r><w:t>a</w:t></w:r>{hyphens}</w:p>"), SPLIT)
    written, _ = read.written([same(each.text) for each in read.sentences])
    assert "".join(ET.fromstring(part(written)).itertext()) == "a--b/>"


def test_formats_may_be_given_up_and_words_and_numbers_never() -> None:
    read = WordDocument(document(), SPLIT)
    made = [same(each.text) for each in read.sentences]
    made[0] = ("dog my & your Tom", [(5, 0), (2, 1), (3, 2), (4, 3), (0, 4)])
    first = part(read.written(made)[0]).partition("<!-- kept")[0]
    assert "".join(texts_in(first)) == "dog my &amp; your Tom He barks."
    bold = "<w:r><w:rPr><w:b/></w:rPr><w:t> \u2013 4\u00a0000</w:t></w:r>"
    number = f"<w:p><w:r><w:t>- 3</w:t></w:r>{bold}</w:p>"
    address = "<w:p><w:r><w:t>See https://x.org/a, Tom.</w:t></w:r></w:p>"
    footer = (HEAD + "<w:p><w:r><w:t>3</w:t></w:r></w:p>" + TAIL).encode()
    read = WordDocument(document(number + address, footer1=footer), SPLIT)
    assert [each.text for each in read.sentences] == ["See , Tom.", "3"]
    written, _ = read.written([same("SIEHE , TOM."), same("3")])
    assert number in part(written)
    assert texts_in(part(written))[2:] == ["SIEHE https://x.org/a, TOM."]
    assert ">3</w:t>" in part(written, "footer1.xml")


def bomb() -> bytes:
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", bytes(docx._LARGEST))
        archive.writestr("word/a", b"a")
    return output.getvalue()


ENTITY = HEAD.replace("<w:document", '<!DOCTYPE a [<!ENTITY b "cc">]><w:document')
REFUSED = [
    (b"no zip", WORD, 400, "not a .docx"),
    (document()[:-40], WORD, 400, "not a .docx"),
    (document().replace(b"\1\2\3", b"\1\1\3"), WORD, 400, "Bad CRC-32"),
    (document("<w:p>"), WORD, 400, "mismatched tag"),
    (document(header1=(ENTITY + TAIL).encode()), WORD, 400, "declares a document type"),
    (document(header1=(HEAD + TAIL).encode("utf-16")), WORD, 400, "UTF-8"),
    (bomb(), WORD, 413, "more than 64 MiB when unpacked"),
    (b"\xff", "text/plain", 400, "not in the encoding utf-8"),
    (b"a\0b", "text/plain", 400, "NUL"),
    (b'<meta charset="nothing">', "text/html", 400, "encoding nothing is none of the web"),
    (b"<meta charset=idna>a", "text/html", 400, "encoding idna is none of the web"),
    (b"<meta charset=utf-7>a", "text/html", 400, "encoding utf-7 is none of the web"),
    (b"a", "text/plain; charset=idna", 400, "encoding idna is none of the web"),
    (b"\x81", "text/plain; charset=latin1", 400, "not in the encoding windows-1252"),
    (document(head=HEAD.replace("UTF-8", "idna")), WORD, 400, "in the encoding idna"),
    (document(f'<w:p xmlns:n="{"n" * 1001}"/>'), WORD, 400, "a namespace has more than 1,000 characters"),
    (gzip.compress(b"a", mtime=0), "text/plain", 400, "compressed with gzip; unpack it"),
    (b"a", "image/png", 415, "image/png is not translated"),
]


@pytest.mark.parametrize(("content", "kind", "status", "said"), REFUSED)
def test_files_that_cannot_be_read(content: bytes, kind: str, status: int, said: str) -> None:
    with pytest.raises(Refused, match=said) as caught:
        read_file(content, kind, TextDivision())
    assert caught.value.status == status


def test_what_counts_as_text_and_encodings_of_the_web() -> None:
    text = b"1 2 3\n\n A dog. \n4 "
    assert sentences_of(text, "text/plain", SPLIT, 12) == ["1 2 3", "A dog.", "4"]
    with pytest.raises(Refused, match="more than the 11 characters"):
        read_file(text, "text/plain", SPLIT, 11)
    assert sentences_of(b"<p>1 2 3</p><p>A dog.</p>", "text/html", SPLIT, 6) == ["A dog."]
    page = '<meta charset="iso-8859-1"><p>caf\u00e9</p>'.encode("latin-1")
    file = read_file(page, "text/html", TextDivision())
    assert [each.text for each in file.sentences] == ["caf\u00e9"]
    written = b'<meta charset="iso-8859-1"><p>\xfc&#128512;</p>', "text/html; charset=windows-1252"
    assert file.written([same("\u00fc\U0001f600")]) == written
    for content_type, head, codec, name in (
        ("text/html", "<meta charset=CP1251>", "cp1251", "windows-1251"),
        ("text/html; charset=windows-1251", "<meta charset=utf-8>", "cp1251", "windows-1251"),
        ("text/html", '<meta http-equiv=a content="text/html; charset=koi8-r">', "koi8-r", "koi8-r"),
        ("text/html", "<meta charset=utf-16>", "utf-8", "utf-8"),
        ("text/plain; charset=utf-16le", "", "utf-16-le", "utf-16le"),
        ('text/plain; format=flowed; charset="KOI8"', "", "koi8-r", "koi8-r"),
        ("text/plain", "\ufeff", "utf-16-le", "utf-16le"),
        ("text/plain; charset=koi8-r", "\ufeff", "utf-16-be", "utf-16be"),
        ("text/html; charset=koi8-r", "\ufeff<meta charset=cp1251>", "utf-8", "utf-8"),
    ):
        file = read_file(f"{head}\u0434\u0430".encode(codec), content_type, TextDivision())
        assert [each.text for each in file.sentences] == ["\u0434\u0430"]
        written = f"{head}\u0442\u044b".encode(codec), f"{content_type.partition(';')[0]}; charset={name}"
        assert file.written([same("\u0442\u044b")]) == written
    file = read_file(b"caf\xe9", "text/plain; charset=iso-8859-1", TextDivision())
    assert [each.text for each in file.sentences] == ["caf\u00e9"]
    assert file.written([same("\u0434")]) == ("\u0434".encode(), "text/plain; charset=utf-8")
    assert len(encodings._BY_LABEL) == 221, "of the standard's 228, without replacement and x-user-defined"
    for label, encoding in encodings._BY_LABEL.items():
        assert "a".encode(encoding.codec).decode(encoding.codec) == "a"
        assert encodings.web_encoding(f" {label.upper()}\n") == encoding
    latin = HEAD.replace("UTF-8", "ISO-8859-1")
    read = WordDocument(document("<w:p><w:r><w:t>f\xfcnf</w:t></w:r></w:p>", latin), SPLIT)
    assert [each.text for each in read.sentences] == ["f\xfcnf"]
    assert ">f&#252;nf &#8364;</w:t>" in part(read.written([same("f\xfcnf \u20ac")])[0])


def send(client: Client, content: bytes, kind: str, query: str = "", key: str = "") -> Answer:
    head = {"Content-Type": kind, **({"Authorization": f"Bearer {key}"} if key else {})}
    return client.ask("POST", f"/translate_file{query}", content, head)


def test_files_are_translated(client: Client, model: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("econmt_serve.app._FILE_SENTENCES", 2)
    one, two, three = (each.text for each in model.translate(["a b!", "C d", "e"]))
    answer = send(client, b"a b! C d\n\n e\n", "text/plain; charset=utf-8", "?source=src&target=trg")
    assert (answer.status, answer.content.decode()) == (200, f"{one} {two}\n\n {three}\n")
    assert answer.headers["content-disposition"] == "attachment"
    page = send(client, b"<p>e<p><b>C d</b>", "text/html").content.decode()
    assert page == f"<p>{three}<p><b>{two}</b>"
    back = send(client, document(), WORD)
    assert back.headers["content-type"] == WORD
    assert "word/document.xml" in zipfile.ZipFile(io.BytesIO(back.content)).namelist()
    assert send(client, b"a", "text/plain", "?target=xx").status == 400
    assert send(client, b"a", "").status == 415


def test_rules_for_words_hold_in_files_as_in_text(client: Client, model: TrainedModel) -> None:
    plain, marked = (model.translate([text])[0].text for text in ("a b c", "C d"))
    avoid, term = plain[:2], b"# two\r\n\r\nC d = BA\r\n"
    rules = {"avoid": [avoid, "X"], "glossary": term.decode()}
    one, two = client.post("/translate", q=["a b c", "C d"], **rules).json["translatedText"]
    assert avoid in plain
    assert avoid not in one
    assert "BA" in two != marked
    page = b"<p>a b c\r\n<p>C d</p>\r\n--"
    file = "file", '; filename="a.html"\r\nContent-Type: text/html; charset=koi8-r', page
    phrase, terms = ("avoid", "", avoid.encode()), ("glossary", "\r\nContent-Type: text/plain", term)
    answer = send(client, *form(phrase, file, terms, ("avoid", "", b"X")), "?source=src&target=trg")
    assert answer.content.decode() == f"<p>{one}\r\n<p>{two}</p>\r\n--"
    assert answer.headers["content-type"] == "text/html; charset=koi8-r"
    assert send(client, *form(file)).content.decode() == f"<p>{plain}\r\n<p>{marked}</p>\r\n--"
    twice = "a field is given twice"
    for parts, status, said in (
        ((phrase, terms), 400, "missing file parameter"),
        ((file, file), 400, twice),
        ((file, terms, terms), 400, twice),
        ((file, ("other", "", b"1")), 400, "other: unknown"),
        ((file, ("glossary", "", b"a\n")), 400, "glossary:1: "),
        ((file, ("glossary", "", b"\xff")), 400, "no form that can be read"),
        ((file, ("avoid", "", b" ")), 400, "avoid[0]"),
        ((file, *[phrase] * 1005), 400, "avoid: "),
        ((file, ("avoid", "", b"A" * 501)), 413, "have 502 characters, more than 500"),
        ((("file", "", b"a"),), 415, "content type none is not translated"),
    ):
        refused = send(client, *form(*parts))
        assert (refused.status, said in refused.json["error"]) == (status, True), refused.content
    assert send(client, b"a", "multipart/form-data").status == 415
    fields = ("source", "", b"src"), ("target", "", b"trg")
    for name, kind in (("a.HTML", ""), ("a.html", "\r\nContent-Type: application/octet-stream")):
        named = "file", f'; filename="{name}"{kind}', b"<p>a b c"
        assert send(client, *form(*fields, named)).content.decode() == f"<p>{plain}"


def test_files_have_a_limit_and_need_the_key(folder: Path) -> None:
    with serving(folder, Settings(max_file_characters=3), Keys(["k"])) as client:
        assert send(client, b"abc", "text/plain", key="k").status == 200
        file = "file", '; filename="a.txt"', b"abc"
        for key, status in ((b"no", 403), (b"k", 200)):
            assert send(client, *form(file, ("api_key", "", key))).status == status
        refused = send(client, b"abcd", "text/plain", key="k")
        assert (refused.status, "more than the 3 characters" in refused.json["error"]) == (413, True)


@pytest.mark.parametrize("pieces", [("Good", "day", "!"), ("(", "day", "s, Tom."), ("", "Good ", "day")])
def test_empty_runs_between_formats_change_nothing(pieces: Sequence[str]) -> None:
    def sentences(empty: str) -> list[Marked]:
        """Every other piece is bold."""
        runs = [
            f'<w:r>{"<w:rPr><w:b/></w:rPr>" * (number % 2)}<w:t xml:space="preserve">{text}</w:t></w:r>'
            for number, text in enumerate(pieces)
        ]
        return WordDocument(document(f"<w:p>{empty.join(runs)}</w:p>"), SPLIT).sentences

    assert sentences("<w:r><w:rPr><w:i/></w:rPr><w:t></w:t></w:r>") == sentences("")
