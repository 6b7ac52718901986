"""The HTTP interface end to end, over the loopback, with a real model."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest

from econmt.api import TrainedModel
from econmt.data.text.glossary import Glossary
from econmt.decoding.requests import Request
from econmt.decoding.translation import EMPTY, Translation
from econmt.errors import InputError
from econmt_serve import answers, queries, server
from econmt_serve.app import Service, _answers
from econmt_serve.models import LoadedModels, TranslationJob, by_pair
from econmt_serve.settings import Refused, Settings
from econmt_serve.text.passages import TextDivision
from tests.conftest import PATIENCE
from tests.unit.serving.conftest import Client, form, serving

LINES = ["a b c", "h g", "d d d d e", "a", "b c d e f g", "e f"]
JSON, FORM = "application/json", "application/x-www-form-urlencoded"


def test_clients_lists_forms_and_details_are_answered(client: Client, model: TrainedModel) -> None:
    expected = [each.text for each in model.translate(LINES)]
    assert len(set(expected)) > 2
    asked = [number % len(LINES) for number in range(60)]
    with ThreadPoolExecutor(12) as clients:
        found = clients.map(lambda at: client.post("/translate", q=LINES[at], source="src"), asked)
        assert [each.json for each in found] == [{"translatedText": expected[at]} for at in asked]
    answer = client.post("/translate", q=["a b\n\nc d", "e"], source="auto", target="trg", alternatives=2)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    lists = model.translate(["a b", "c d", "e"], nbest_size=3)
    first, second, third = ([entry.text for entry in each.hypotheses] for each in lists)
    assert answer.json == {
        "translatedText": [f"{first[0]}\n\n{second[0]}", third[0]],
        "alternatives": [[f"{first[rank]}\n\n{second[rank]}" for rank in (1, 2)], third[1:]],
        "detectedLanguage": [{"language": "src", "confidence": 0.0}] * 2,
    }
    fields = {"q": "a b c", "source": "src", "target": "trg", "alternatives": "1"}
    content, kind = form(*((name, "", value.encode()) for name, value in fields.items()))
    best, other = (entry.text for entry in model.translate(["a b c"], nbest_size=2)[0].hypotheses)
    for answer in (
        client.ask("POST", "/translate", urlencode(fields).encode(), {"Content-Type": FORM}),
        client.ask("POST", "/translate", content, {"Content-Type": kind}),
        client.post("/translate", **fields, format=None),
    ):
        assert answer.json == {"translatedText": best, "alternatives": [other]}
    blank = client.ask("POST", "/translate", b"q=&target=", {"Content-Type": FORM})
    assert (blank.status, blank.json["translatedText"]) == (200, "")
    expected = model.translate(["a b c"])[0]
    found = client.post("/translate", q={"text": "a b c", "id": 7}, details=True).json
    (details,) = found["details"]
    whole = (7, expected.tokens, expected.source_tokens)
    assert tuple(details[name] for name in ("id", "tokens", "source_tokens")) == whole
    assert details["log_probability"] == pytest.approx(expected.log_probability, abs=1e-4)
    mean = math.exp(expected.log_probability / (len(expected.tokens) + 1))
    assert details["confidence"] == pytest.approx(mean, abs=1e-3)
    assert len(details["attention"]) == len(expected.tokens) + 1
    for row, theirs in zip(details["attention"], expected.attention.tolist(), strict=True):
        assert row == pytest.approx(theirs, abs=1e-4)
    assert found["milliseconds"] > 0.0


def test_details_too_large_to_be_written_are_refused(
    client: Client, model: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = model.translate(["a b c"], nbest_size=2)[0].hypotheses
    weights = sum(each.attention.numel() for each in both)
    for most, status in ((weights, 200), (weights - 1, 413)):
        monkeypatch.setattr(answers, "_MOST_WEIGHTS", most)
        said = client.post("/translate", q="a b c", details=True, alternatives=1)
        assert said.status == status
    assert said.json["error"].endswith("send parts, or set attention to false")
    monkeypatch.setattr(answers, "_MOST_WEIGHTS", 10)
    streamed = client.post("/translate", q="a b c", details=True, stream=True)
    assert "send parts" in json.loads(streamed.content)["error"]
    (details,) = client.post("/translate", q="a b c", details=True, attention=False).json["details"]
    assert not {"attention", "alignment"} & {*details, *details["nbest"][0]}


def test_wishes_hold_and_characters_are_counted(client: Client) -> None:
    whole = client.post("/translate", q="a b c", constraints=["H G"], avoid=["C"], target_prefix="D").json
    words = whole["translatedText"].split()
    assert words[0] == "D"
    assert "H G" in " ".join(words)
    assert "C" not in words
    own = client.post("/translate", q=[{"text": "a b c", "constraints": ["F F"]}, "a b c"]).json
    assert ["F F" in text for text in own["translatedText"]] == [True, False]
    for glossary in ({"c": "G E"}, "# terms\nc, G E\n"):
        found = client.post("/translate", q="a b c\nb a", glossary=glossary).json["translatedText"]
        assert ["G E" in line for line in found.split("\n")] == [True, False]
    for given, size in (
        ({}, 3),
        ({"constraints": ["de"]}, 6),
        ({"glossary": {"d": "ef"}, "avoid": ["g"]}, 10),
        ({"q": [{"text": "abc", "other": "x"}]}, 18),
    ):
        body = queries.TranslateBody.model_validate({"q": "abc", **given})
        queries.check_size(body, size)
        with pytest.raises(Refused, match=f"^q.* {size} characters, this server takes {size - 1} at a"):
            queries.check_size(body, size - 1)
    rules = queries.FileBody(file=(b"", "text/plain"), avoid=["ab"])
    queries.check_rules(rules, 3)
    with pytest.raises(Refused, match="have 3 characters, more than 2"):
        queries.check_rules(rules, 2)


def test_an_error_in_one_line_gives_up_the_others_and_terms_of_a_request_are_found_by_its_language() -> None:
    async def ask() -> tuple[bool, int]:
        failed, other = (asyncio.get_running_loop().create_future() for _ in range(2))
        failed.set_exception(InputError("line 1"))
        client: Any = SimpleNamespace(receive=asyncio.Event().wait)
        with pytest.raises(InputError):
            await _answers(client, [failed, other])
        await asyncio.sleep(0)  # a cancelled task ends in the next turn of the loop
        return other.cancelled(), len(asyncio.all_tasks())

    assert asyncio.run(ask()) == (True, 1)
    glossary = {"ışık": "light"}
    for language, expected in (("tr", True), ("en", False)):
        body = queries.TranslateBody(q="IŞIK", glossary=glossary)
        (text,) = queries.texts_of(body, 500, TextDivision(), language)
        assert (text.sentences[0].glossary is not None) == expected


def test_streams_that_are_left_and_those_of_sentences(client: Client, model: TrainedModel) -> None:
    async def leave() -> list[bool]:
        futures: list[asyncio.Future[Translation]] = [
            asyncio.get_running_loop().create_future() for _ in range(3)
        ]
        futures[0].set_result(EMPTY)
        body = queries.TranslateBody(q=["a", "b", "c"], source="src", target="trg", stream=True)
        texts = queries.texts_of(body, 500, TextDivision())
        lines = Service._streamed(None, texts, futures, body, 0.0)  # type: ignore[arg-type]
        assert json.loads(await anext(lines)) == {"line": 0, "translatedText": ""}
        await lines.aclose()  # type: ignore[attr-defined]
        return [future.cancelled() for future in futures]

    assert asyncio.run(leave()) == [False, True, True]
    answer = client.post("/translate", q=["a b", "c d\ne"], stream=True, alternatives=1)
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    *lines, last = [json.loads(line) for line in answer.content.decode().splitlines()]
    expected = model.translate(["a b", "c d", "e"], nbest_size=2)
    assert lines == [
        {"line": number, "translatedText": each.text, "alternatives": [each.hypotheses[1].text]}
        for number, each in enumerate(expected)
    ]
    assert last["done"] is True


def test_html_keeps_its_tags(client: Client, model: TrainedModel) -> None:
    (whole, other) = (each.text for each in model.translate(["a b c", "d e"]))
    page = '<p class="x">a\n b <b>c</b><p><i>d e</i>'
    found = client.post("/translate", q=page, format="html", source="src").json["translatedText"]
    assert re.fullmatch(r'<p class="x">.*<b>.*</b>.*<p><i>.*</i>', found)
    assert found.endswith(f"<p><i>{other}</i>")
    assert re.sub("<.*?>", "", found.partition("<p><i>")[0]).split() == whole.split()


SEVERAL = "a b! C d.\n\n  e f? G h. "


def test_each_sentence_of_a_paragraph_is_translated(client: Client, model: TrainedModel) -> None:
    sentences = ["a b!", "C d.", "e f?", "G h."]
    one, two, three, four = (each.text for each in model.translate(sentences))
    found = client.post("/translate", q=SEVERAL, alternatives=1, details=True).json
    assert found["translatedText"] == f"{one} {two}\n\n  {three} {four} "
    places = [(each["line"], each["source"]) for each in found["details"]]
    assert places == list(zip((0, 0, 2, 2), sentences, strict=True))
    assert len(found["alternatives"]) == 1
    assert found["alternatives"][0].count("\n") == 2
    streamed = client.post("/translate", q=["x\n", SEVERAL], stream=True).content.splitlines()
    assert [json.loads(line).get("line") for line in streamed] == [0, 2, 2, 4, 4, None]


def test_words_capitals_and_none_of_them(client: Client, model: TrainedModel, folder: Path) -> None:
    one, two = (each.text for each in model.translate(["a b", "c d"]))
    text = "3\n1,234.56\ta b\nhttps://x.org/a?b=1 \nc d\n\t7\u00a0000 "
    found = client.post("/translate", q=text, details=True, alternatives=1).json
    told = model.translate(["1,234.56 a b"])[0].text
    assert found["translatedText"] == text.replace("1,234.56\ta b", told).replace("c d", two)
    assert [other.split("\n")[0] for other in found["alternatives"]] == ["3"], "which has no other"
    first, address = found["details"][0], found["details"][2]
    assert (first["source"], first["translation"], first["confidence"]) == ("3", "3", 1.0)
    assert (first["attention"], [each["alignment"] for each in first["nbest"]]) == ([], [[[0, 0]]])
    assert address["translation"] == "https://x.org/a?b=1"
    page = f"<table><td>1&nbsp;234<td>a b</table>{'<p>&mdash; 3 <b>4</b>' * 3}"
    back = client.post("/translate", q=page, format="html").json["translatedText"]
    assert back == page.replace("a b", one)
    terms = Glossary({"b": "G H"})
    settings = Settings(split_sentences=False, restore_case=True, avoid=("A",), glossary=terms)
    with serving(folder, settings) as client:

        def translate(text: str) -> str:
            return str(client.post("/translate", q=text).json["translatedText"])

        found = translate("a b c")
        assert found == model.translate(["a b c"], avoid=["A"], glossary=terms)[0].text
        assert "G H" in found
        assert "A" not in found.split()
        assert translate("a! C") == model.translate(["a! C"], avoid=["A"])[0].text, "not split"
        small = model.translate(["C d e f"], avoid=["A"])[0].text
        assert translate("C D E F") == small.upper()
        refused = client.post("/translate", q="a b", constraints=["A"])
        assert (refused.status, "avoided phrase" in refused.json["error"]) == (400, True)
        assert client.post("/translate", q="c").status == 200


def test_contradictions_at_the_start_and_what_it_has(folder: Path, client: Client) -> None:
    settings = Settings(avoid=("A",), glossary=Glossary({"b": "G A"}))
    with pytest.raises(InputError, match="glossary: b = G A contains an avoided phrase"):
        by_pair([folder], settings)
    # A glossary of a request stops no other sentence.
    (served,) = by_pair([folder], settings._replace(glossary=None))
    requests = [Request("b", glossary=Glossary({"b": "G A"})), Request("c")]
    refused, translated = served.loaded.translate(requests, TranslationJob())
    assert isinstance(refused, InputError)
    assert isinstance(translated, Translation)
    with pytest.raises(InputError, match="are for one language pair, and the models have 2"):
        by_pair([folder, folder / "none"], settings)
    assert client.get("/languages").json == [
        {"code": "src", "name": "src", "targets": ["trg"]},
        {"code": "trg", "name": "trg", "targets": []},
    ]
    note = "not detected: src is the only source language of this server"
    assert client.post("/detect", q="hallo").json == [{"language": "src", "confidence": 0.0, "note": note}]
    assert client.get("/health").json == {"status": "ok"}
    settings = client.get("/frontend/settings").json
    assert (settings["apiKeys"], settings["charLimit"], settings["alternatives"]) == (False, 500, 3)
    assert settings["language"]["target"] == {"code": "trg", "name": "trg"}
    assert settings["supportedFilesFormat"] == [".txt", ".html", ".docx"]
    suggested = client.post("/suggest", q="a", s="b", source="src", target="trg")
    assert (suggested.status, suggested.json["error"]) == (403, "Suggestions are disabled on this server.")
    assert client.post("/translate", q="a", target="xx").json["hint"] == "this server translates src to trg"
    client.post("/translate", q="a b c")
    text = client.get("/metrics").content.decode()
    assert 'econmt_requests_total{path="/translate",status="200"}' in text
    assert "econmt_batch_sentences_bucket" in text
    assert "process_resident_memory_bytes" in text


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js", "/attention.js", "/server.js", "/icon.svg"])
def test_the_page_comes_from_the_package_and_may_load_nothing_else(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status == 200
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert b"http://" not in answer.content.replace(b"http://www.w3.org/", b"")
    assert b"https://" not in answer.content


LONG = "x" * 200_000
PARTS = "this server takes 500"
ONE = "constraints and target_prefix belong to one sentence"
WRONG = [
    ({}, 400, "Invalid request: missing q parameter"),
    ({"q": None, "source": None}, 400, "Invalid request: missing q parameter"),
    ({"q": 3}, 400, "the request: q: expected a text, a list of texts or an object, as"),
    ({"q": ["a", 3]}, 400, "the request: q[1]: expected a text or an object"),
    ({"q": "a", "beam": 3}, 400, "the request: beam: "),
    ({"q": "a", "source": "fr"}, 400, "fr is not supported"),
    ({"q": "a", "source": "fr", "target": "xx"}, 400, "fr is not supported"),
    ({"q": "a", "target": "fr"}, 400, "fr is not supported"),
    ({"q": "a", "source": "trg"}, 400, "source trg and target none fit no pair"),
    ({"q": "a", "alternatives": 4}, 400, "alternatives 4: at most 3, the beam keeps 4 hypotheses"),
    ({"q": "a" * 501}, 413, f"q has 501 characters, {PARTS} at a time; send parts"),
    ({"q": ["a b", "c"], "constraints": ["A"]}, 400, ONE),
    ({"q": "a\nb", "target_prefix": "A"}, 400, f"q: {ONE}; this has 2"),
    ({"q": {"text": "a\nb", "constraints": ["A"]}}, 400, f"q: {ONE}; this has 2"),
    ({"q": [{"text": "a", "constrains": ["A"]}]}, 400, "q[0]: unknown field constrains"),
    ({"q": [{"text": "a", "factors": ["x"]}]}, 400, "q[0]: factors: the model has no source factors"),
    ({"q": "a", "glossary": {"a": " "}}, 400, "glossary: 'a': the translation is blank"),
    ({"q": "a", "glossary": "a = d\nb"}, 400, "glossary:2: 1 column in 'b'"),
    ({"q": ["", ""] * 300}, 413, f"q has 600 characters, {PARTS} at a time"),
    ({"q": "a", "avoid": ["b"] * 250}, 413, f"q and its constraints have 501 characters, {PARTS}"),
    ({"q": "a", "target_prefix": "D" * 501}, 413, "q and its constraints have 502 characters"),
    ({"q": "a", "glossary": {"a": "D" * 501}}, 413, "q and its constraints have 505 characters"),
    ({"q": {"text": "a", "constraints": ["D" * 501]}}, 413, "q has 5"),
    ({"q": "a", "target_prefix": "D " * 200}, 413, "q: constraints and target_prefix have 400 tokens, a tra"),
    ({"q": "a", "constraints": ["ß"]}, 400, "q: the constraint 'ß' has characters or words that the"),
    ({"q": "a", "avoid": [" "]}, 400, "the request: avoid[0] is blank"),
    ({"q": "a", "format": "html", "stream": True}, 400, "stream writes sentences without the markup around"),
    ({"q": "a\x00"}, 400, "q: text: the character U+0000 is not allowed in text"),
    ({"q": "a", "source": LONG}, 400, "xxx"),
    ({"q": "a", "target": LONG}, 400, "xxx"),
    ({"q": "a", LONG: 1}, 400, "the request: xxx"),
    ({"q": "a", "format": LONG}, 400, "the request: format: must be one of text, html, found the text 'xxx"),
    ({"q": "a", "alternatives": LONG}, 400, "the request: alternatives: expected a whole number, found the"),
    ({"q": "a", "alternatives": 10**4000}, 400, "the request: alternatives: "),
    ({"q": "a", "glossary": {LONG: 1}}, 400, "the request: glossary.xxx"),
    ({"q": "a", "source": "\u202e" * 20_000}, 400, "\\u202e"),
]


@pytest.mark.parametrize(("fields", "status", "said"), WRONG)
def test_what_cannot_be_done_is_told_in_a_line(
    client: Client, fields: dict[str, object], status: int, said: str
) -> None:
    answer = client.post("/translate", **fields)
    assert answer.status == status
    assert answer.json["error"].startswith(said)
    assert "\n" not in answer.json["error"]
    assert len(answer.json["error"]) < 500


def test_what_a_whole_request_wishes_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(queries, "check_request", lambda request, _: seen.append(len(request.avoid)))
    found = requests_of(*["a"] * 50, avoid=["b"] * 70)
    assert sum(seen) == 70
    assert [len(each.avoid) for each in found] == [70] * 50


def requests_of(*entries: object, **wishes: Any) -> list[Request]:
    """The sentences of a request with these entries, which wishes this of all of them."""
    body = queries.TranslateBody(q=[*entries], **wishes)
    return [text.sentences[0] for text in queries.texts_of(body, 500, TextDivision())]


def test_what_an_entry_wishes_is_added_to_what_the_request_wishes() -> None:
    """Lists of both count, a prefix and terms of the entry come before those of the request."""
    wishes = {"constraints": ["K"], "target_prefix": "P", "glossary": {"b": "X"}}
    entry = {"text": "A B c", "avoid": ["X"], **wishes}
    found = requests_of(entry, {"text": "b"}, "c", avoid=["Y", "Z"])
    avoiding = [(each.text, [*each.avoid], [*each.constraints]) for each in found]
    assert avoiding == [("A B c", ["X", "Y", "Z"], ["K"]), ("b", ["Y", "Z"], []), ("c", ["Y", "Z"], [])]
    wishes = {"avoid": ["Y"], "constraints": ["L"], "target_prefix": "Q", "glossary": {"a": "A", "b c": "B"}}
    (request,) = requests_of(entry, **wishes)
    assert (list(request.avoid), list(request.constraints)) == (["X", "Y"], ["K", "L"])
    assert request.target_prefix == "P"
    assert [each.target for each in request.glossary.occurrences(request.text)] == ["A", "X"]
    (request,) = requests_of("a", target_prefix="Q", glossary={"a": "A", "b": "B"})
    assert request.target_prefix == "Q"
    assert [each.target for each in request.glossary.occurrences("a b")] == ["A", "B"]


BODIES = [
    (b"{", JSON, 400, ""),
    (b"[]", JSON, 400, ""),
    (b"\xff\xfe", JSON, 400, ""),
    (b"[" * 100_000, JSON, 400, ""),
    (b"x" * 300_000, JSON, 413, ""),
    (b"q=a&alternatives=x", FORM, 400, ""),
    (b"q=%ff", FORM, 400, ""),
    (b"q=a&source=src&q=b", FORM, 400, "the request: a field is given twice; give each once"),
    (b"hello", "text/plain", 415, "content type text/plain is not read; send application/json or a form"),
    (b"hello", "", 415, "content type none is not read"),
    (b"", "", 400, "Invalid request: missing q parameter"),
    (b"{}", "x" * 30_000, 415, "content type xxx"),
]


@pytest.mark.parametrize(("body", "kind", "status", "said"), BODIES)
def test_bodies_that_are_none(client: Client, body: bytes, kind: str, status: int, said: str) -> None:
    answer = client.ask("POST", "/translate", body, {"Content-Type": kind})
    assert (answer.status, answer.json["error"][: len(said)]) == (status, said)
    assert len(answer.content) < 300


def test_addresses_that_are_none(client: Client) -> None:
    assert client.get("/translate").status == 405
    for path in ("/no/such", "/languages/?" + "x" * 30_000):
        answer = client.get(path)
        assert (answer.status, answer.json) == (404, {"error": "Not Found"})


TWICE = [
    (b'{"q": "a", "q": "b"}', "the key 'q' is given twice"),
    (b'{"q": "a", "\\u0071": "b"}', "the key 'q' is given twice"),
    (b'{"q": "a", "' + b"x" * 9000 + b'": 1, "' + b"x" * 9000 + b'": 1}', "the key 'xxx"),
    (b'{"q": {"text": "a", "id": -Infinity}}', "-Infinity is not a finite number"),
    (b'{"q": {"text": "a", "id": -' + b"9" * 400 + b".0}}", "is not a finite number"),
    (b'{"q": {"text": "a", "id": ' + b"9" * 5000 + b"}}", "Exceeds the limit"),
]


@pytest.mark.parametrize(("body", "said"), TWICE)
def test_json_with_two_meanings_or_none_is_refused(client: Client, body: bytes, said: str) -> None:
    answer = client.ask("POST", "/translate", body, {"Content-Type": JSON})
    assert answer.status == 400
    assert answer.json["error"].startswith("the request: broken, not valid JSON (")
    assert said in answer.json["error"]
    end = '); send a JSON object, as {"q": "A dog runs.", "source": "en", "target": "de"}'
    assert answer.json["error"].endswith(end)
    assert len(answer.json["error"]) < 300


def test_phrases_in_errors_are_cut(folder: Path) -> None:
    with serving(folder, Settings(max_characters=100_000)) as client:
        for fields in (
            {"constraints": ["ß" * 90_000]},
            {"glossary": {"ß" * 90_000: " "}},
            {"q": {"text": "a", "target_prefi": "a", "x" * 90_000: 1}},
        ):
            answer = client.post("/translate", **{"q": "a", **fields})
            assert answer.status in (400, 413)
            assert len(answer.json["error"]) <= 1000
        streamed = client.post("/translate", q="a", constraints=["ß" * 90_000], stream=True)
        assert len(streamed.content) < 10_000


def exchange(client: Client, *parts: bytes, wait: bool = True) -> bytes:
    """What a server says to bytes that are sent as they are."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE) as connection:
        for part in parts:
            connection.sendall(part)
        found = b""
        while wait and (block := connection.recv(65536)):
            found += block
    return found


def test_garbage_and_clients_that_leave(
    client: Client, model: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for garbage in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX\x00Y: z\r\n\r\n",
    ):
        said = exchange(client, garbage + b"\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 400 ") or said == b""
    assert client.post("/translate", q="a b c").json["translatedText"] == model.translate(["a b c"])[0].text

    def left() -> float:
        text = client.get("/metrics").content.decode()
        found = re.search(r'econmt_requests_total\{path="/translate",status="499"\} ([0-9.]+)', text)
        return float(found[1]) if found else 0.0

    before = left()
    body = json.dumps({"q": "a b c d e f\n" * 30}).encode()
    head = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    translate, gone, end = LoadedModels.translate, threading.Event(), time.monotonic() + PATIENCE
    monkeypatch.setattr(LoadedModels, "translate", lambda *job: gone.wait(PATIENCE) and translate(*job))
    for _ in range(3):
        exchange(client, head + b"Content-Length: %d\r\n\r\n" % len(body) + body, wait=False)
    while left() < before + 3:
        assert time.monotonic() < end
    gone.set()
    assert client.post("/translate", q="a b c").json["translatedText"] == model.translate(["a b c"])[0].text


def test_a_client_that_says_nothing_is_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEAD_SECONDS", 0.1)
    with serving(folder, Settings()) as client:
        assert exchange(client, b"") == b""
        assert exchange(client, b"POST /transl") == b""
        monkeypatch.setattr(server, "_HEAD_SECONDS", PATIENCE)
        with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE) as kept:
            kept.sendall(b"GET /languages HTTP/1.1\r\nHost: x\r\n\r\n")
            assert kept.recv(65536).startswith(b"HTTP/1.1 200 ")
            monkeypatch.setattr(server, "_HEAD_SECONDS", 0.1)
            kept.sendall(b"GET /langu")
            while kept.recv(65536):
                pass
        monkeypatch.undo()
        assert client.get("/health").status == 200
