"""``econmt export --web`` in a browser without a window: the same translations as the runtime's, and a page that stands all text."""

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
from typing import Any

import pytest
import sentencepiece
import torch

import econmt_runtime
from econmt.data.text.subwords import fingerprint, load_vocabularies
from econmt.export.lexicon import write_lexicon
from econmt.export.runtime import export_runtime
from econmt_runtime.text import PAD, Subwords
from tests.conftest import ROOT
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.cli.test_runtime import VARIANTS, random_model
from tests.unit.serving.test_page import CHROMIUM, MISSING, expect, sync_api
from tests.unit.serving.test_page import browser as browser

in_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
LINES = ["a b c", "h g", "", "d d d e a b c h g f e d c b a", "b", "zzz a", "12 - ", "www.a.bc and é"]
ENGINE = ("econmt.js", "worker.js", "econmt.wasm")
WEB = ROOT / "runtime/econmt_runtime/web"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder on a server of files."""
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def page(browser: sync_api.Browser) -> Iterator[sync_api.Page]:
    """An empty page, whose scripts must not fail."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    opened = context.new_page()
    failed: list[str] = []
    opened.on("pageerror", lambda error: failed.append(str(error)))
    yield opened
    context.close()
    assert failed == []


TRANSLATE = """async ([lines, options]) => {
  const { load } = await import("./econmt.js");
  const model = await load("./");
  const found = [];
  for (const line of lines)
    found.push(await model.translate(line, options).then((all) => all.map(({ text, score, nbest }) => [text, score, nbest.length]), (error) => error.message));
  model.close();
  return found;
}"""


def translate(page: sync_api.Page, *lines: object, **options: object) -> Any:
    """Returns the text, score and number of translations of each line of several lists, or the error."""
    return page.evaluate(TRANSLATE, [lines, options])


@in_browser
@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", ["int8", "float32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_translations_are_those_of_the_runtime(
    subword_model: Path, tmp_path: Path, page: sync_api.Page, use: Any, variant: str, precision: str
) -> None:
    folder = random_model(subword_model, tmp_path / "model", variant, {"beam_size": 4})
    size = load_vocabularies(folder).source.size
    lexicon = torch.stack([torch.randperm(size)[:9] for _ in range(size)]).int()
    lexicon[PAD] = PAD  # else what a sentence may use depends on its batch
    write_lexicon(tmp_path / "lexicon", lexicon, fingerprint(folder))
    made = [tmp_path / name for name in ("runtime", "web")]
    for path in made:
        export_runtime(folder, path, precision, tmp_path / "lexicon", web=path == made[1])
    with served(made[1]) as home:
        page.goto(f"{home}model.json")
        for options in ({}, {"shortlist": 0}, {"shortlist": 3}):
            translator = econmt_runtime.load(made[0], nbest_size=2, **options)
            use(0)  # no instruction that multiplies and adds with one rounding: browsers have none
            expected = translator.translate(LINES)
            (found,) = translate(page, LINES, nbest=2, **options)
            assert [each[::2] for each in found] == [[each.text, len(each.nbest)] for each in expected]
            assert [each[1] for each in found] == pytest.approx(
                [each.score for each in expected], abs=1e-4, rel=0
            )


SUBWORDS = """onmessage = ({ data: [model, lines] }) => {
  const words = new Subwords(Uint8Array.from(model));
  postMessage(lines.map((line) => words.encode(line.normalize("NFC").replace(AROUND, ""))).map((ids) => [ids, words.decode(ids)]));
};"""


@in_browser
@pytest.mark.parametrize(
    ("kind", "rules"), [("bpe", "identity"), ("bpe", "nmt_nfkc_cf"), ("unigram", "nmt_nfkc")]
)
def test_subwords_are_those_of_sentencepiece(
    tmp_path: Path, page: sync_api.Page, kind: str, rules: str
) -> None:
    draw = random.Random(1)
    scripts = (
        "abcdeéß",
        "αβγδώ",
        "абвгд",
        "אבגד",
        "ابتث",
        "अआकि",
        "กขคำ",
        "一丁七",
        "가각간",
        "あいガｶﾞ",
        "ﬁ½Ⅳ①́\u200d\0😀\u3000",
    )
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
    text = (WEB / "worker.js").read_text(encoding="utf-8")
    (tmp_path / "probe.js").write_text(text.replace("\nwork();\n", SUBWORDS), encoding="utf-8")
    expected = Subwords(tmp_path / "it.model")
    with served(tmp_path) as home:
        page.goto(f"{home}probe.js")
        ask = """(data) => new Promise((resolve, reject) => {
          const probe = new Worker("probe.js");
          [probe.onmessage, probe.onerror] = [(event) => resolve(event.data), reject];
          probe.postMessage(data);
        })"""
        found = page.evaluate(ask, [[*model.getvalue()], lines])
    for line, (ids, decoded) in zip(lines, found, strict=True):
        assert (ids, decoded) == (expected.encode(line), expected.decode(ids)), line


@pytest.fixture(scope="module")
def model(subword_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(subword_model, tmp_path_factory.mktemp("web") / "model", "student", {"beam_size": 2})


def type_in(page: sync_api.Page, text: str) -> str:
    page.locator("#source").fill(text)
    expect(page.locator("#status")).to_contain_text("in this browser alone")
    expect(page.locator(".sentence.stale")).to_have_count(0)
    return page.locator("#target").inner_text()


@in_browser
@pytest.mark.slow
def test_the_page_translates_also_without_a_network_and_from_one_file(
    model: Path, tmp_path: Path, page: sync_api.Page
) -> None:
    folder, file = (export_runtime(model, tmp_path / name, web=True) for name in ("folder", "page.html"))
    text = "a b c. d e!\n\n<img src=x onerror=alert(1)> <script>alert(1)</script> h"
    alerts: list[str] = []
    page.on("dialog", lambda dialog: alerts.append(dialog.message))
    with served(folder) as home:
        page.goto(home)
        translation = type_in(page, text)
        page.locator(".sentence").first.press("Enter")
        expect(page.locator("#others li").first).to_be_visible()
        page.evaluate("navigator.serviceWorker.ready.then(() => null)")
    page.reload()
    assert type_in(page, text) == translation
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    assert type_in(page, text) == translation
    assert [url for url in asked if not url.startswith("blob:")] == [file.as_uri()]
    assert alerts == []
    assert sum((folder / name).stat().st_size for name in ENGINE) <= 150_000


@in_browser
@pytest.mark.slow
def test_hostile_text_and_damage_end_in_a_line_or_a_translation(
    model: Path, tmp_path: Path, page: sync_api.Page
) -> None:
    folder = export_runtime(model, tmp_path / "web", web=True)
    with served(folder) as home:
        page.goto(f"{home}model.json")
        long = [
            ["x" * 1_000_000],
            ["a " * 500_000],
            ["e" + "\u0301" * 100_000],
            ["a\0b"],
            ["www.(" * 200_000],
        ]
        assert all(isinstance(each, list) for each in translate(page, *long))
        wrong = translate(page, "a", [1])
        assert wrong == ['translate takes a list of lines of text, as translate(["A dog."])'] * 2
        assert translate(page, ["a"], nbest=3) == ["nbest: use a whole number from 1 to the beam size, 2"]
        told = page.evaluate(f"() => ({TRANSLATE})([[['a', 'b \\ud800']], {{}}])")
        assert told == ["line 2: the character U+D800 is not allowed in text; remove it"]
        cancel = """async () => {
          const model = await (await import("./econmt.js")).load("./");
          const control = new AbortController();
          const asked = model.translate(Array(5000).fill("a b c d e f g h"), { signal: control.signal });
          setTimeout(() => control.abort(), 50);
          return [await asked.catch((error) => error.name), (await model.translate(["a"])).length];
        }"""
        assert page.evaluate(cancel) == ["AbortError", 1]
        arrays = (folder / "arrays.safetensors").read_bytes()
        (folder / "arrays.safetensors").write_bytes(arrays[:-9] + b"x" + arrays[-8:])
        page.goto(home)
        expect(page.get_by_role("alert")).to_contain_text("arrays.safetensors is damaged or of another model")


def test_refusals(word_model: Path, subword_model: Path, call: Call, tmp_path: Path) -> None:
    made = tmp_path / "made"
    refused(call("export --web", word_model, made), "its vocabulary is a list of words; --web needs")
    refused(call("export --web --runtime", subword_model, made), "--web cannot be combined with --runtime")
    call("export --web", subword_model, made)
    config = json.loads((made / "model.json").read_text())
    files = {"arrays.safetensors", "subwords.model", *(path.name for path in WEB.iterdir())}
    assert {*config["files"]} == files
    assert {path.name for path in made.iterdir()} == {*files, "model.json"}
    refused(call("export --web", subword_model, made), "exists already")


@pytest.mark.slow
def test_the_library_is_compiled_from_these_sources(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    make = ["make", "-s", "web", "VENV=none", f"PYTHON={sys.executable}", f"WASM={tmp_path / 'made.wasm'}"]
    subprocess.run(make, cwd=ROOT, check=True)
    assert (tmp_path / "made.wasm").read_bytes() == (WEB / "econmt.wasm").read_bytes()
