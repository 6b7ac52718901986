"""Text, HTML and Word documents there and back, and files that are refused."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

import pytest

from econmt.api import TrainedModel
from econmt.decoding.passages import TextDivision, division
from econmt.decoding.sentences import sentence_spans
from econmt.serving import docx
from econmt.serving.access import Keys
from econmt.serving.docx import WordDocument
from econmt.serving.files import WORD, read_file
from econmt.serving.settings import Refused, Settings
from tests.unit.decoding.test_markup_reader import translation
from tests.unit.serving.conftest import Answer, Client, serving

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


def document(body: str = BODY, **parts: bytes) -> bytes:
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("word/document.xml", HEAD + body + TAIL)
        archive.writestr("word/media/image1.png", bytes(range(256)))
        for name, content in parts.items():
            archive.writestr(f"word/{name}.xml", content)
    return output.getvalue()


def test_a_document_keeps_all_but_its_text() -> None:
    read = WordDocument(
        document(header1=(HEAD + "<w:p><w:r><w:t>top</w:t></w:r></w:p>" + TAIL).encode()), SPLIT
    )
    texts = [each.text for each in read.sentences]
    assert texts == ["Tom is my & your dog.", "He barks.", "left", "right link", "box", "cell", "top"]
    written = zipfile.ZipFile(io.BytesIO(read.written([translation(text.upper()) for text in texts])))
    assert written.testzip() is None
    assert written.namelist() == [
        "[Content_Types].xml",
        "word/document.xml",
        "word/media/image1.png",
        "word/header1.xml",
    ]
    assert written.read("word/media/image1.png") == bytes(range(256))
    assert b">TOP<" in written.read("word/header1.xml")
    xml = written.read("word/document.xml").decode()
    assert re.findall("<w:t[^>]*>([^<]*)</w:t>", xml) == [
        "TOM IS ",
        "MY &amp; YOUR",
        "",
        " DOG. HE BARKS.",
        "LEFT",
        "RIGHT ",
        "LINK",
        "BOX",
        "CELL",
    ]
    without = re.compile("<w:t(?: [^>]*)?>[^<]*</w:t>")
    assert without.sub("T", xml) == without.sub("T", HEAD + BODY + TAIL)


def test_a_format_that_would_move_is_given_up_but_no_word() -> None:
    read = WordDocument(document(), SPLIT)
    made = [translation(each.text) for each in read.sentences]
    entry = (
        made[0]
        .hypotheses[0]
        ._replace(text="dog my & your Tom", alignment=[(5, 0), (2, 1), (3, 2), (4, 3), (0, 4)])
    )
    made[0] = made[0]._replace(hypotheses=[entry])
    xml = zipfile.ZipFile(io.BytesIO(read.written(made))).read("word/document.xml").decode()
    first = xml.partition("<!-- kept")[0]
    assert "".join(re.findall("<w:t[^>]*>([^<]*)</w:t>", first)) == "dog my &amp; your Tom He barks."


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
    (b'<meta charset="nothing">', "text/html", 400, "not in the encoding nothing"),
    (b"a", "image/png", 415, "image/png is not translated"),
]


@pytest.mark.parametrize(("content", "kind", "status", "said"), REFUSED)
def test_files_that_cannot_be_read(content: bytes, kind: str, status: int, said: str) -> None:
    with pytest.raises(Refused, match=said) as caught:
        read_file(content, kind, TextDivision())
    assert caught.value.status == status


def test_numbers_and_addresses_of_a_document_stay() -> None:
    number = (
        "<w:p><w:r><w:t>- 3</w:t></w:r><w:r><w:rPr><w:b/></w:rPr><w:t> \u2013 4\u00a0000</w:t></w:r></w:p>"
    )
    address = "<w:p><w:r><w:t>See https://x.org/a, Tom.</w:t></w:r></w:p>"
    footer = (HEAD + "<w:p><w:r><w:t>3</w:t></w:r></w:p>" + TAIL).encode()
    read = WordDocument(document(number + address, footer1=footer), SPLIT)
    assert [each.text for each in read.sentences] == ["See , Tom.", "3"]
    made = [translation("SIEHE , TOM."), translation("3")]
    written = zipfile.ZipFile(io.BytesIO(read.written(made)))
    xml = written.read("word/document.xml").decode()
    assert number in xml
    assert re.findall("<w:t[^>]*>([^<]*)</w:t>", xml)[2:] == ["SIEHE https://x.org/a, TOM."]
    assert b">3</w:t>" in written.read("word/footer1.xml")


def test_pages_keep_their_encoding() -> None:
    page = '<meta charset="iso-8859-1"><p>caf\u00e9</p>'.encode("latin-1")
    file = read_file(page, "text/html", TextDivision())
    assert [each.text for each in file.sentences] == ["caf\u00e9"]
    assert file.written([translation("\u00fc\u20ac")]) == b'<meta charset="iso-8859-1"><p>\xfc&#8364;</p>'
    text = "\ufeffa\r\n".encode()
    assert read_file(text, "text/plain", TextDivision()).written([translation("b")]) == "\ufeffb\r\n".encode()


def send(client: Client, content: bytes, kind: str, query: str = "", key: str = "") -> Answer:
    head = {"Content-Type": kind, **({"Authorization": f"Bearer {key}"} if key else {})}
    return client.ask("POST", f"/translate_file{query}", content, head)


def test_the_server_translates_files(
    client: Client, model: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("econmt.serving.app._FILE_SENTENCES", 2)
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


def test_files_have_a_limit_and_need_the_key(folder: Path) -> None:
    with serving(folder, Settings(most_file_characters=3), Keys(["k"])) as client:
        assert send(client, b"abc", "text/plain").status == 403
        assert send(client, b"abc", "text/plain", key="k").status == 200
        refused = send(client, b"abcd", "text/plain", key="k")
        assert (refused.status, "4 characters" in refused.json["error"]) == (413, True)
