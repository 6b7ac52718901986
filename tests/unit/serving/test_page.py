"""The page in a browser without a window: Chromium, where one is installed."""

from __future__ import annotations

import contextlib
import gzip
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import econmt
from econmt.api import TrainedModel
from econmt.estimate.report.page import page as memory_page
from econmt_serve.files import WORD
from econmt_serve.settings import Settings
from tests.conftest import PATIENCE
from tests.unit.cli.test_runtime import two_targets
from tests.unit.memory.samples import make_profile, make_report
from tests.unit.serving.conftest import Client, serving
from tests.unit.serving.test_files import document

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
MISSING = "no Chromium is installed (Debian: apt-get install chromium)"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]
expect = sync_api.expect
expect.set_options(timeout=1000 * PATIENCE)
DROP = """(names) => {
  const dataTransfer = new DataTransfer();
  for (const name of names) dataTransfer.items.add(new File([`the text of ${name}`], `${name}.txt`));
  document.dispatchEvent(new DragEvent("drop", { dataTransfer }));
}"""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=1000 * PATIENCE)
        yield launched
        launched.close()


@pytest.fixture
def page(browser: sync_api.Browser, client: Client) -> Iterator[sync_api.Page]:
    """The page of the server; it may ask nobody else, and its scripts must not fail."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    context.set_default_timeout(1000 * PATIENCE)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened = context.new_page()
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    home = f"http://127.0.0.1:{client.port}/"
    opened.goto(home)
    expect(opened.get_by_role("heading", name="src")).to_be_visible()
    yield opened
    assert opened.page_errors() == []
    context.close()
    assert asked
    assert all(url.startswith(home) for url in asked)


def test_translates_as_one_types(page: sync_api.Page, model: TrainedModel) -> None:
    for text in ("a b c", "h g"):
        page.get_by_role("textbox", name="src").fill(text)
        expect(page.locator("#target")).to_have_text(re.compile(model.translate([text])[0].text))
    expect(page.locator("#figures")).to_be_hidden()
    page.get_by_text("Details", exact=True).click()
    expect(page.locator("#figures")).to_contain_text(re.compile(r"Confidence \d+ %.* ms at the .*received"))
    page.get_by_role("textbox", name="src").fill("")
    expect(page.locator("#target")).to_have_text("")
    expect(page.locator("#attention-card")).to_be_hidden()


def test_attention_follows_pointer_and_keys(page: sync_api.Page, model: TrainedModel) -> None:
    page.get_by_role("textbox", name="src").fill("a b c")
    page.get_by_text("Details", exact=True).click()
    found = model.translate(["a b c"])[0]
    assert found.attention is not None
    words = found.text.split()
    expect(page.locator(".word")).to_have_count(len(words))
    rows = page.locator("#attention tbody tr")
    expect(rows).to_have_count(len(words) + 1)
    expect(page.locator("#attention thead th")).to_have_text(["a", "b", "c", "end"])
    page.locator(".word").first.hover()
    expect(page.locator("#readout")).to_contain_text(f"“{words[0]}” looked at")
    expect(rows.first).to_have_class("at")
    shares = [int(text) for text in rows.first.locator("td").all_text_contents()]
    assert sum(shares) == pytest.approx(100, abs=3)
    rows.nth(1).locator("td").nth(0).hover()
    expect(page.locator("#readout")).to_contain_text(f"“{words[1]}” looked at “a”")
    rows.nth(1).locator("td").nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#readout")).to_contain_text(f"“{words[2]}” looked at “b”")


def test_a_glossary_that_changes_during_a_translation_counts(page: sync_api.Page) -> None:
    held: list[sync_api.Route] = []
    page.route("**/translate", lambda route: route.continue_() if held else held.append(route))
    with page.expect_request("**/translate"):
        page.locator("#source").fill("a b c")
    page.locator("#glossary").fill("b = ß")
    page.locator("#source").focus()
    with contextlib.suppress(sync_api.Error):  # the page has left it
        held[0].continue_()
    expect(page.locator("#glossary-wrong")).to_contain_text("The model cannot write “ß”.")


def test_errors_stand_at_the_field_in_a_person_s_words(page: sync_api.Page) -> None:
    source, glossary, avoid = map(page.locator, ("#source", "#glossary", "#avoid"))
    source.fill("a b c")
    for term, told in (("b = ß", "The model cannot write “ß”."), ("b", "Line 1 cannot be read.")):
        glossary.fill(term)
        source.focus()
        expect(page.locator("#glossary-wrong")).to_contain_text(told)
        expect(glossary).to_have_attribute("aria-invalid", "true")
    glossary.fill("b = G\n")
    expect(page.get_by_role("alert").filter(visible=True)).to_have_count(0)
    for words, told in (("a\0", "The character U+0000 cannot be read. Remove it."), ("", "")):
        avoid.evaluate("(field, words) => (field.value = words)", words)
        avoid.dispatch_event("change")
        expect(page.locator("#avoid-wrong")).to_have_text(told)
    source.fill("a" * 600)
    alert = page.locator("[data-field=text]")
    expect(alert).to_contain_text("The text has 600 characters, and this server takes 500 at a time.")
    source.evaluate("field => field.firstChild.replaceChildren('a\\0b')")
    source.press("End")
    page.keyboard.type("c")
    expect(alert).to_contain_text("The text has a character that cannot be read, U+0000.")


def test_a_glossary_line_counts_when_it_is_left(page: sync_api.Page) -> None:
    page.get_by_role("textbox", name="src").fill("a b c")
    expect(page.locator("#others-card")).to_be_visible()
    bodies: list[str] = []
    page.on("request", lambda request: bodies.append(request.post_data or ""))
    glossary = page.get_by_label(re.compile("Glossary"))
    glossary.click()
    place = glossary.bounding_box()
    page.keyboard.type("b = G", delay=20)
    page.wait_for_timeout(400)
    assert bodies == []
    expect(page.locator("#others-card")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator("#target")).to_contain_text("G")
    page.keyboard.type("c")
    page.get_by_label(re.compile("Words to avoid")).focus()
    expect(page.locator("#glossary-wrong")).to_have_text("Line 2 cannot be read. Write “dog = Hund”.")
    assert glossary.bounding_box() == place
    assert len(bodies) == 2
    page.reload()
    expect(glossary).to_have_value("b = G\nc")


def test_a_translation_is_not_refused_for_its_attention(
    page: sync_api.Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("econmt_serve.answers._MOST_WEIGHTS", 10)
    page.get_by_role("textbox", name="src").fill("a b c d")
    expect(page.locator("#target p:not(.stale) .word").first).to_be_visible()
    expect(page.get_by_role("alert").filter(visible=True)).to_have_count(0)
    page.get_by_text("Details", exact=True).click()
    expect(page.locator("#readout")).to_have_text("This sentence is too long for its attention to be shown.")
    expect(page.locator("#attention")).to_be_hidden()


def test_an_old_translation_is_grey_until_the_next_comes(page: sync_api.Page, model: TrainedModel) -> None:
    source = page.get_by_role("textbox", name="src")
    source.fill("a b\nc d")
    lines = page.locator("#target p")
    expect(lines.nth(1)).to_have_text(model.translate(["c d"])[0].text)
    held: list[sync_api.Route] = []
    page.route("**/translate", lambda route: held.append(route))
    with page.expect_request("**/translate"):
        source.fill("a b\nc")
    expect(lines.nth(1)).to_have_class("stale")
    expect(lines.nth(1)).to_have_text(model.translate(["c d"])[0].text)
    expect(lines.nth(0)).not_to_have_class("stale")
    page.wait_for_timeout(300)
    while not held:
        page.wait_for_timeout(300)
    assert [each.request.post_data_json["q"] for each in held] == [["c"]]
    held[0].continue_()
    expect(lines.nth(1)).to_have_text(model.translate(["c"])[0].text)
    expect(lines.nth(1)).not_to_have_class("stale")


def test_lines_stay_side_by_side(page: sync_api.Page, model: TrainedModel) -> None:
    text = "a b! C d\n\n" + "a b c d e f g h " * 12 + "\ne"
    page.get_by_role("textbox", name="src").fill(text)
    last = model.translate(["e"])[0].text
    expect(page.locator("#target p").nth(3)).to_have_text(last)
    top = "lines => lines.map(line => line.getBoundingClientRect().top)"
    tops = [page.locator(place).evaluate_all(top) for place in ("#source .line", "#target p")]
    assert len(tops[0]) == 4
    assert tops[0] == pytest.approx(tops[1], abs=2)
    first = " ".join(each.text for each in model.translate(["a b!", "C d"]))
    expect(page.locator("#target p").first).to_have_text(first)


def test_the_source_is_edited_like_any_text(page: sync_api.Page) -> None:
    source = page.get_by_role("textbox", name="src")
    source.click()
    page.keyboard.type("a b")
    page.keyboard.press("Enter")
    page.keyboard.type("d")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("End")
    page.keyboard.type(" c")
    expect(page.locator("#source .line")).to_have_text(["a b c", "d"])
    page.evaluate("navigator.clipboard.writeText('e\\nf\\n\\ng')")
    page.keyboard.press("Control+v")
    expect(page.locator("#source .line")).to_have_text(["a b ce", "f", "", "g", "d"])
    page.keyboard.type("h")
    expect(page.locator("#source .line").nth(3)).to_have_text("gh")
    page.evaluate("navigator.clipboard.writeText('i\\n'.repeat(4000))")
    page.keyboard.press("Control+v")
    expect(page.locator("#source .line")).to_have_text(["a b ce", "f", "", "ghi", *["i"] * 3999, "", "d"])
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    expect(page.locator("#source")).to_have_text("")
    page.keyboard.type("a")
    expect(page.locator("#source .line")).to_have_text(["a"])
    expect(page.locator("#target p")).to_have_count(1)


def test_another_translation_is_chosen_and_copied(page: sync_api.Page, model: TrainedModel) -> None:
    page.get_by_role("textbox", name="src").fill("a b c! C")
    (found,) = model.translate(["a b c!"], nbest_size=4)
    best, *others = dict.fromkeys(each.text for each in found.hypotheses)
    items = page.locator("#others li span")
    expect(items).to_have_text([each for each in others if each.strip()])
    page.evaluate("kept = navigator.clipboard; navigator.__proto__ = {}")  # as over plain http
    page.evaluate("wait = setTimeout; setTimeout = (act) => later.push(act); later = []")
    page.get_by_role("button", name="Copy “").first.dblclick()
    expect(page.get_by_text("Copied")).to_be_visible()
    page.evaluate("setTimeout = wait; later.forEach((act) => act())")
    assert page.evaluate("kept.readText()") == others[0]
    expect(page.get_by_text("Copied")).to_have_count(0)
    page.get_by_role("button", name="Use “").first.click()
    expect(page.locator("#target")).to_have_text(f"{others[0]} {model.translate(['C'])[0].text}")
    expect(items.first).to_have_text(best)


def test_words_are_one_stop_of_the_tab_key(page: sync_api.Page) -> None:
    page.get_by_role("textbox", name="src").fill("a b c\nd e f")
    words = page.locator(".word")
    expect(page.locator("#target p:not(.stale)")).to_have_count(2)
    words.first.focus()
    page.keyboard.press("ArrowRight")
    expect(words.nth(1)).to_be_focused()
    page.keyboard.press("End")
    expect(words.last).to_be_focused()
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.closest('p') === document.querySelector('#target p')")
    assert page.locator(".word[tabindex='0']").count() == 1
    page.keyboard.press("Tab")
    expect(page.locator(".word:focus")).to_have_count(0)
    page.keyboard.press("Shift+Tab")
    expect(page.locator(".word:focus")).to_have_count(1)


def test_sentences_that_may_be_incomplete_are_marked(page: sync_api.Page) -> None:
    def shortened(route: sync_api.Route) -> None:
        answer = route.fetch()
        found = answer.json()
        found["details"][0][0] |= {"tokens": ["x"], "source_tokens": ["x"] * 4}
        for sentence, cut in zip(found["details"][0], (False, True, False), strict=True):
            sentence["nbest"][0]["cut"] = cut
        route.fulfill(response=answer, json=found)

    page.route("**/translate", shortened)
    page.get_by_role("textbox", name="src").fill("a b! C d! E")
    expect(page.locator(".doubt")).to_have_count(2)
    expect(page.get_by_role("note").first).to_have_attribute("title", re.compile("much shorter"))
    expect(page.get_by_role("note").nth(1)).to_have_attribute("title", re.compile("cut off"))
    expect(page.locator("#doubts")).to_have_text("2 sentences may be incomplete; see the marks.")


def test_files_are_opened_and_saved(page: sync_api.Page, model: TrainedModel) -> None:
    letter = {"name": "letter.txt", "mimeType": "text/plain", "buffer": b"a b\r\n\r\nc"}
    page.locator("#file").set_input_files(letter)
    expect(page.locator("#source .line")).to_have_text(["a b", "", "c"])
    one, two = (each.text for each in model.translate(["a b", "c"]))
    expect(page.locator("#target p")).to_have_text([one, "", two])
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save").click()
    assert saved.value.suggested_filename == "letter.trg.txt"
    assert saved.value.path().read_text() == f"{one}\n\n{two}"
    with page.expect_download() as translated:
        page.locator("#file").set_input_files({"name": "x.docx", "mimeType": WORD, "buffer": document()})
    assert translated.value.suggested_filename == "x.trg.docx"
    assert zipfile.ZipFile(translated.value.path()).testzip() is None
    alert = page.locator("[data-field=text]")
    expect(alert).to_have_text("x.docx is translated and saved.")
    with page.expect_download() as translated:  # of more characters than the field takes
        page.locator("#file").set_input_files({**letter, "buffer": b"a b\n" * 200})
    assert translated.value.suggested_filename == "letter.trg.txt"
    assert translated.value.path().read_text() == f"{one}\n" * 200
    for name, content, told in (
        ("x.docx", b"no", "This file cannot be read as a Word document."),
        ("x.png", b"\0\xff", "This file is no text."),
        ("x.csv", "f\xfcnf".encode("latin-1"), "This text is not in UTF-8. Save it in UTF-8"),
        ("x.csv", gzip.compress(b"a"), "This file is compressed with gzip."),
        ("x.csv", "a b".encode("utf-16"), ""),
    ):
        page.locator("#file").set_input_files({"name": name, "mimeType": "", "buffer": content})
        expect(alert).to_contain_text(told)
    expect(page.locator("#source .line")).to_have_text(["a b"])
    for names, told in (("ab", "Drop one file at a time."), ("c", "")):
        page.evaluate(DROP, names)
        expect(alert).to_have_text(told)
    expect(page.locator("#source .line")).to_have_text(["the text of c"])
    busy, paths = {"Retry-After": "1"}, re.compile("_file|languages")
    page.route(paths, lambda it: it.fulfill(status=503, headers=busy))
    page.locator("#file").set_input_files({"name": "x.docx", "mimeType": WORD, "buffer": document()})
    expect(alert).to_have_text("The server is busy.")
    page.reload()
    expect(alert).to_have_text("The server is busy. It is tried again in 1 s.")
    page.unroute(paths)
    expect(page.get_by_role("heading", name="src")).to_be_visible()


def test_requests_are_tried_in_the_documentation(page: sync_api.Page, model: TrainedModel) -> None:
    page.get_by_role("link", name="API").click()
    expect(page.get_by_role("heading", name="API")).to_be_visible()
    page.get_by_text("POST /translate", exact=True).click()
    expect(page.get_by_role("rowheader", name="target_prefix").first).to_be_visible()
    text = model.translate(["a b c"])[0].text
    for body, told in (('{"q": "a b c"}', "200"), ('{"q": "a b c"}', text), ('{"q": 1}', "400")):
        page.get_by_role("textbox", name="Body").fill(body)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".answer:visible")).to_contain_text(told)
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_text_is_never_read_as_html(page: sync_api.Page) -> None:
    page.get_by_text("Details", exact=True).click()
    page.get_by_role("textbox", name="src").fill("<b>a</b> <img src=x onerror=alert(1)>")
    expect(page.locator("#attention thead th").first).to_contain_text("<unk>b<unk>a")
    expect(page.locator("main img, main b")).to_have_count(0)


def test_a_language_is_chosen_where_tags_do(browser: sync_api.Browser, folder: Path, tmp_path: Path) -> None:
    model = econmt.load(two_targets(folder.parent, tmp_path), precision="float32")
    with serving(tmp_path / "model", Settings()) as client, browser.new_page() as opened:
        opened.goto(f"http://127.0.0.1:{client.port}/")
        menu, target = opened.get_by_role("combobox", name="Languages"), opened.locator("#target")
        expect(menu.get_by_role("option")).to_have_text(
            [f"Any language to {each}" for each in ("French", "German")]
        )
        opened.locator("#source").fill("a b! C")
        for code, name in (("fr", "French"), ("de", "German")):
            menu.select_option(f"Any language to {name}")
            texts = model.translate([f"<2{code}> a b!", f"<2{code}> C"])
            expect(target).to_have_text(" ".join(each.text for each in texts))
            expect(target).to_have_attribute("lang", code)
        doubt = "own => import('./target.js').then(it => it.TargetView.prototype.doubt({...own, nbest: []}))"
        tokens = {"tokens": ["a"], "source_tokens": ["\u2581<2fr>", "\u2581a", "b", "c"]}
        assert opened.evaluate(doubt, tokens) == "", "the tag is no part of the sentence"


@pytest.mark.parametrize("width", [400, 1280])
def test_a_page_of_memory_fits(browser: sync_api.Browser, width: int) -> None:
    with browser.new_page(viewport={"width": width, "height": 800}) as opened:
        opened.set_content(memory_page(make_report(make_profile("reference", 900), make_profile("all", 100))))
        wider = "parts => parts.filter(part => part.scrollWidth > part.clientWidth).length"
        assert opened.locator("html, .bars, .bars .line, .compared, svg").evaluate_all(wider) == 0
        assert width < 1000 or opened.locator(".wide:visible").evaluate_all(wider) == 0
        before = opened.locator(".compared .before")
        assert before.bounding_box()["width"] > 0.7 * opened.locator(".compared svg").bounding_box()["width"]  # type: ignore[index]


def test_fits_a_phone_in_both_colours(page: sync_api.Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_role("textbox", name="src").fill("a b c d e f g\nh g f e d c b a")
    page.get_by_text("Details", exact=True).click()
    expect(page.locator("#attention-card")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    page.locator("#theme").click()
    assert page.evaluate(ground) != before
    heights = "buttons => buttons.map(button => button.getBoundingClientRect().height)"
    assert min(page.locator("button:visible:not(.word)").evaluate_all(heights)) >= 44
