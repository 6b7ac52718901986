"""``econmt export --web`` in a browser: the runtime's translations, SentencePiece's subwords, and a page that stands all text."""

from __future__ import annotations

import functools
import http.server
import io
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto

import econmt_runtime
from econmt.data.text.glossary import Glossary
from econmt.decoding.translation import Translation
from econmt.export.runtime import export_runtime
from econmt_runtime.text import Subwords
from tests.conftest import PATIENCE, ROOT
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.cli.test_runtime import (
    LINES,
    VARIANTS,
    exact,
    random_model,
    two_targets,
    write_random_lexicon,
)
from tests.unit.serving.test_page import CHROMIUM, MISSING, expect, sync_api
from tests.unit.serving.test_page import browser as browser

in_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
WEB = ROOT / "runtime/econmt_runtime/web"
SCRIPTS = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
TRANSLATE, SUBWORDS, CHANGE, LINES_OF_PAGE, FAILURES = (
    f"(data) => ({SCRIPTS}).{name}(data)" for name in ("translate", "subwords", "change", "lines", "failures")
)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder on a server of files."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def page(browser: sync_api.Browser) -> Iterator[sync_api.Page]:
    """An empty page, whose scripts must not fail."""
    with browser.new_page() as opened:
        opened.set_default_timeout(1000 * PATIENCE)
        yield opened
        assert opened.page_errors() == []


@in_browser
@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("precision", "most"), [("int8", 0.0), ("float32", 1e-4)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_translations_are_those_of_the_runtime(
    subword_model: Path, tmp_path: Path, page: sync_api.Page, variant: str, precision: str, most: float
) -> None:
    folder = random_model(subword_model, tmp_path / "model", variant, {"beam_size": 4})
    write_random_lexicon(tmp_path / "lexicon", folder)
    for name in ("runtime", "web"):
        export_runtime(folder, tmp_path / name, precision, tmp_path / "lexicon", web=name == "web")
    with served(tmp_path / "web") as home:
        page.goto(f"{home}model.json")
        for options in ({}, {"shortlist": 0}, {"shortlist": 3}):
            translator = econmt_runtime.load(tmp_path / "runtime", nbest_size=2, **options)
            expected = translator.translate(LINES)
            (found,) = page.evaluate(TRANSLATE, [[LINES], {"nbest": 2, **options}])
            assert [each[::2] for each in found] == [[each.text, len(each.nbest)] for each in expected]
            scores = [each.score for each in expected]
            assert [each[1] for each in found] == pytest.approx(scores, abs=most, rel=0)


@in_browser
@pytest.mark.slow
def test_glossaries_act_as_in_econmt(subword_model: Path, tmp_path: Path, page: sync_api.Page) -> None:
    folder = random_model(subword_model, tmp_path / "model", "gru-deep", {"beam_size": 3})
    lines, terms = [*LINES, "A a b a b", "h", "3"], {"a b": "c d", "h": "d d e", "a": "h", "3": "b"}
    with served(export_runtime(folder, tmp_path / "web", web=True)) as home:
        page.goto(f"{home}model.json")
        expected = exact(folder).translate(lines, nbest_size=2, glossary=Glossary(terms))
        (found,) = page.evaluate(TRANSLATE, [[lines], {"nbest": 2, "glossary": [*terms.items()]}])
        assert [each[::2] for each in found] == [[each.text, len(each.hypotheses)] for each in expected]
        assert [each[1] for each in found] == pytest.approx([each.score for each in expected], abs=1e-4)
        for wrong, told in {"a=b\na\tc": "a has another", "a=𐿾": "cannot write"}.items():
            assert told in page.evaluate(TRANSLATE, [[["a"]], {"glossary": wrong}])[0]
        assert page.evaluate(FAILURES) == []


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize("rules", ["bpe identity", "bpe nmt_nfkc_cf", "unigram nmt_nfkc"])
def test_subwords_are_those_of_sentencepiece(tmp_path: Path, page: sync_api.Page, rules: str) -> None:
    kind, rules = rules.split()
    draw = random.Random(1)
    scripts = ("abeéß", "αβώ", "абв", "אבג", "ابت", "अकि", "กคำ", "一丁", "가각", "あｶﾞ", "ﬁ½①\u0301\0😀\u3000")  # fmt: skip
    words = ["".join(draw.choices(draw.choice(scripts), k=draw.randint(1, 6))) for _ in range(300)]
    lines = [draw.choice((" ", " ", "  ", "", ". ")).join(draw.choices(words, k=9)) for _ in range(1500)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines), model_writer=model, model_type=kind, vocab_size=600, hard_vocab_limit=False,
        pad_id=0, unk_id=1, bos_id=2, eos_id=3, normalization_rule_name=rules, byte_fallback=rules == "nmt_nfkc",
        character_coverage=0.98, user_defined_symbols=["\u2581<t>"], minloglevel=2, num_threads=1,
    )  # fmt: skip
    (tmp_path / "it.model").write_bytes(model.getvalue())
    lines += ["<t> a", "a <t><t>b", "</s> <s> <unk> \u2581 a", "", "  ", "𝔞\ue000\U0010fffd a", "a" * 3000]
    expected = Subwords(tmp_path / "it.model")
    with served(WEB) as home:
        page.goto(f"{home}worker.js")
        found = page.evaluate(SUBWORDS, [[*model.getvalue()], lines])
    for line, (ids, decoded) in zip(lines, found, strict=True):
        assert (ids, decoded) == (expected.encode(line), expected.decode(ids)), line


@in_browser
@pytest.mark.slow
def test_the_page_translates_without_a_network_and_stands_all_text(
    subword_model: Path, tmp_path: Path, page: sync_api.Page
) -> None:
    model = random_model(subword_model, tmp_path / "model", "student", {"beam_size": 2})
    folder, file = (export_runtime(model, tmp_path / name, web=True) for name in ("folder", "page.html"))
    text = "a b c. d e!\n\n<img src=x onerror=alert(1)> <script>alert(1)</script> h"
    asked: list[str] = []
    page.on("dialog", lambda dialog: asked.append(dialog.message))

    def translation() -> str:
        page.locator("#source").fill(text)
        expect(page.locator("#status")).to_contain_text("in this browser alone")
        return page.locator("#target").inner_text()

    with served(folder) as home:
        page.goto(home)
        expected = translation()
        expect(page.get_by_role("combobox")).to_have_count(0)
        page.locator("#wishes").evaluate("(details) => (details.open = true)")
        for glossary, told in ("h = a a a\nh", "Line 2: write a term"), ("h = a a a", ""):
            page.locator("#glossary").fill(glossary)
            expect(page.locator("#glossary-wrong")).to_contain_text(told)
        expect(page.locator("#target")).to_contain_text("a a a")
        page.locator("#glossary").fill("")
        expect(page.locator("#target")).to_have_text(expected, use_inner_text=True)
        page.locator(".sentence").first.press(" ")
        expect(page.locator("#others li").first).to_be_visible()
        assert page.evaluate(LINES_OF_PAGE) == ["Copied.", True, "Ready"]
        page.evaluate("navigator.serviceWorker.ready.then(() => null)")
        long = ["x" * 1_000_000, "a " * 500_000, "e" + "\u0301" * 100_000, "www.(" * 200_000, "a\0"]
        found = page.evaluate(TRANSLATE, [["a", [1], ["a b c d"] * 9999, *([line] for line in long)], {}])
        told = 'translate takes a list of lines of text, as translate(["A dog."])'
        assert found[:3] == [told, told, "signal timed out"]
        assert all(isinstance(each, list) for each in found[3:])
        (told,) = page.evaluate(f"() => ({TRANSLATE})([[['a', 'b \\ud800']], {{}}])")
        assert told == "line 2: the character U+D800 is not allowed in text; remove it"
    page.goto(f"{home}?from=elsewhere#top")  # the server is gone
    assert translation() == expected
    page.goto((folder / "index.html").as_uri())
    expect(page.locator("#status")).to_contain_text("a web server")
    page.on("request", lambda request: asked.append(request.url.partition(":")[0]))
    page.goto(file.as_uri())
    assert translation() == expected
    assert asked == ["file", "blob", "blob"]
    arrays = (folder / "arrays.safetensors").read_bytes()
    (folder / "arrays.safetensors").write_bytes(arrays[:-9] + b"x" + arrays[-8:])
    with served(folder) as home:
        page.goto(home)
        expect(page.get_by_role("alert")).to_contain_text("arrays.safetensors is damaged or of another model")


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize("mark", ["", "\u2581"])
def test_a_model_of_two_target_languages_translates_to_the_chosen_one(
    text: Path, tmp_path: Path, page: sync_api.Page, mark: str
) -> None:
    like, terms = two_targets(text, tmp_path), {"b": "d e", "h": "a a"}
    subwords = ModelProto.FromString((like / "subwords.model").read_bytes())
    for piece in subwords.pieces[4:6]:
        piece.piece = piece.piece.replace("\u2581", mark)
    (like / "subwords.model").write_bytes(subwords.SerializeToString())
    folder = random_model(like, tmp_path / "own", "lstm, softrelu")
    model, lines = exact(folder), ["a b.", "C d。", "e", "<2fr> h", "3"]

    def translated(code: str, terms: dict[str, str]) -> list[Translation]:
        tagged = [f"<2{code}> {each}" for each in lines[:3]]
        return model.translate([*tagged, *lines[3:]], glossary=Glossary(terms), nbest_size=2)

    def shown(code: str, terms: dict[str, str]) -> list[str]:
        *first, own, copied = (each.text for each in translated(code, terms))
        return [f"{' '.join(first)}\n{own}\n{copied}", code]

    def load_again(script: str = "") -> None:
        """Under load, Chromium loads one page of a file in fifty without its localStorage; the next has it."""
        for _ in range(50):
            page.evaluate(script)
            page.reload()
            if page.evaluate("localStorage.getItem(`target ${location.pathname}`)"):
                return

    for name in ("web", "page.html"):
        export_runtime(folder, tmp_path / name, web=True)
    with served(tmp_path / "web") as home:
        page.goto(f"{home}model.json")
        for pairs in ({}, terms):
            options = {"nbest": 2, "glossary": [*pairs.items()], "target": "de"}
            (found,), expected = page.evaluate(TRANSLATE, [[lines], options]), translated("de", pairs)
            assert [each[0] for each in found] == [each.text for each in expected]
            assert [each[1] for each in found] == pytest.approx([each.score for each in expected], abs=1e-4)
        assert page.evaluate(TRANSLATE, [[["a"]], {"target": "it"}]) == ["target: use one of fr, de"]
        assert "beem: unknown option" in page.evaluate(TRANSLATE, [[["a"]], {"beem": 2}])[0]
        for address in (home, (tmp_path / "page.html").as_uri()):
            page.goto(address)
            choice = page.get_by_role("combobox", name="Translation to")
            expect(choice.get_by_role("option")).to_have_text(["French", "German"])
            assert page.evaluate(CHANGE, {"source": "a b. C d。e\n<2fr> h\n3"}) == shown("fr", {})
            assert page.evaluate(CHANGE, {"language": "de"}) == shown("de", {})
            assert page.evaluate(CHANGE, {"glossary": "b = d e\nh = a a"}) == shown("de", terms)
            page.locator(".sentence").first.click()
            expect(page.locator("#others-source")).to_have_text("a b.")
            assert page.evaluate(CHANGE, {"language": "fr"}) == shown("fr", {})
            page.evaluate(CHANGE, {"language": "de"})
            load_again()
            expect(choice).to_have_value("de")
            assert page.evaluate(CHANGE, {"source": "a b. C d。e\n<2fr> h\n3"}) == shown("de", terms)
            load_again("localStorage.setItem(`glossary ${location.pathname}`, 'a = b')")  # while it loads
            expect(choice).to_have_value("de")
            expect(page.locator("#glossary")).to_have_value("a = b")


def test_what_is_written_and_refused(
    word_model: Path, subword_model: Path, call: Call, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    refused(call("export --web", word_model, made), "its vocabulary is a list of words; --web needs")
    refused(call("export --web --runtime", subword_model, made), "--web cannot be combined with --runtime")
    call("export --web", subword_model, made)
    files = {"arrays.safetensors", "subwords.model", *(path.name for path in WEB.iterdir())}
    config = json.loads((made / "model.json").read_text())
    assert ({*config["files"]}, "targets" in config) == (files, False)
    assert {path.name for path in made.iterdir()} == {*files, "model.json"}
    assert sum(path.stat().st_size for path in WEB.iterdir()) <= 150_000


@pytest.mark.slow
def test_the_library_is_compiled_from_these_sources(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    make = ["make", "-s", "web", "VENV=none", f"PYTHON={sys.executable}", f"WASM={tmp_path / 'made.wasm'}"]
    subprocess.run(make, cwd=ROOT, check=True)
    assert (tmp_path / "made.wasm").read_bytes() == (WEB / "econmt.wasm").read_bytes()
