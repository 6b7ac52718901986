"""The page in a browser without a window: Chromium, where one is installed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest

from econmt.api import Request, TrainedModel
from tests.unit.serving.conftest import Client

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
    ),
]
expect = sync_api.expect


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: sync_api.Browser, client: Client) -> Iterator[sync_api.Page]:
    """The page of the server; it may ask nobody else, and its scripts must not fail."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    opened = context.new_page()
    asked: list[str] = []
    failed: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("pageerror", lambda error: failed.append(str(error)))
    home = f"http://127.0.0.1:{client.port}/"
    opened.goto(home)
    expect(opened.get_by_role("heading", name="src")).to_be_visible()
    yield opened
    context.close()
    assert failed == []
    assert asked
    assert all(url.startswith(home) for url in asked)


def translation_of(page: sync_api.Page) -> sync_api.Locator:
    return page.locator("#target")


def test_translates_as_one_types(page: sync_api.Page, model: TrainedModel) -> None:
    for text in ("a b c", "h g"):
        page.get_by_role("textbox", name="src").fill(text)
        expect(translation_of(page)).to_have_text(re.compile(model.translate([text])[0].text))
    expect(page.locator("#figures")).to_contain_text(
        re.compile(r"Confidence \d+ %.* ms at the server.*received.*model")
    )
    page.get_by_role("textbox", name="src").fill("")
    expect(translation_of(page)).to_have_text("")
    expect(page.locator("#attention-card")).to_be_hidden()


def test_attention_follows_pointer_and_keys(page: sync_api.Page, model: TrainedModel) -> None:
    page.get_by_role("textbox", name="src").fill("a b c")
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


def test_another_word_is_chosen_by_keyboard(page: sync_api.Page, model: TrainedModel) -> None:
    page.get_by_role("textbox", name="src").fill("a b c")
    first = model.translate(["a b c"])[0].text.split()[0]
    word = page.locator(".word").first
    expect(word).to_have_text(first)
    word.focus()
    page.keyboard.press("Enter")
    items = page.get_by_role("menuitem")
    expect(items.first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(items.nth(1)).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("menu")).to_be_hidden()
    expect(word).to_be_focused()
    page.keyboard.press("Enter")
    expect(items.first).to_be_focused()
    chosen = items.first.evaluate("item => item.firstChild.textContent")
    assert chosen != first
    page.keyboard.press("Enter")
    expected = model.translate([Request("a b c", target_prefix=chosen)])[0].text
    expect(translation_of(page)).to_have_text(re.compile(expected))


def test_glossary_is_followed_and_remembered(page: sync_api.Page) -> None:
    page.get_by_role("textbox", name="src").fill("a b c")
    page.get_by_label(re.compile("Glossary")).fill("b = G H")
    expect(translation_of(page)).to_contain_text("G H")
    page.reload()
    expect(page.get_by_label(re.compile("Glossary"))).to_have_value("b = G H")


def test_errors_of_the_server_are_shown(page: sync_api.Page) -> None:
    page.get_by_role("textbox", name="src").fill("a b c")
    page.get_by_label(re.compile("Glossary")).fill("b = ß")
    expect(page.get_by_role("alert")).to_contain_text(
        "has characters or words that the target vocabulary lacks"
    )
    page.get_by_label(re.compile("Glossary")).fill("")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_text_is_never_read_as_html(page: sync_api.Page) -> None:
    page.get_by_role("textbox", name="src").fill("<b>a</b> <img src=x onerror=alert(1)>")
    expect(page.locator("#attention thead th").first).to_contain_text("<unk>b<unk>a")
    expect(page.locator("main img, main b")).to_have_count(0)


def test_fits_a_phone_in_both_colours(page: sync_api.Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_role("textbox", name="src").fill("a b c d e f g\nh g f e d c b a")
    expect(page.locator("#attention-card")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    grounds = set()
    for _ in range(2):
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.locator("#theme").click()
    assert len(grounds) == 2
    sizes = page.locator("button:visible:not(.word)").evaluate_all(
        "buttons => buttons.map(button => button.getBoundingClientRect().height)"
    )
    assert min(sizes) >= 44
