"""Checks that HTML pages come back from econmt_serve.text.markup_reader with all their text and tags.

    python -m scripts.html_pages FOLDER [--pages 50] [--model runs/mine]

Reads pages of a folder and its subfolders, evenly chosen, and puts "translations" into them: the sentences themselves,
and their words in reverse order. The standard library's parser, which shares no code with econmt, then has to find the
same text and the same markup, in the first case in the same order. With ``--model`` each page is also translated; all
its markup must be there, and no sentence may be empty.
"""

from __future__ import annotations

import argparse
import sys
import time
import unicodedata
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import econmt
from econmt.decoding.translation import NBestEntry, Translation
from econmt_serve.text.markup_reader import html_passage
from econmt_serve.text.passages import Passage, division
from econmt_serve.text.sentences import splitter_for


class Contents(HTMLParser):
    """Text and markup of a page, as the standard library reads them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self._texts, self.markup = list[str](), list[str]()
        self.feed(page)
        self.close()

    @property
    def characters(self) -> str:
        """The text without any white space, in NFC as models read it."""
        return "".join(unicodedata.normalize("NFC", "".join(self._texts)).split())

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002, D102
        self.markup.append(self.get_starttag_text() or tag)

    def handle_endtag(self, tag: str) -> None:  # noqa: D102
        self.markup.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:  # noqa: D102
        self._texts.append(data)

    def _keep(self, data: str) -> None:
        self.markup.append(data)

    handle_comment = handle_decl = unknown_decl = handle_pi = _keep


def reordered(text: str, *, reverse: bool) -> Translation:
    """Returns a text as its own translation, with its words in order or in reverse, and the alignment."""
    words = text.split()
    order = range(len(words))[:: -1 if reverse else 1]
    made = " ".join(words[number] for number in order)
    entry = NBestEntry(made, [], [], 0.0, 0.0, None, False, list(zip(order, range(len(words)), strict=True)))
    return Translation(made, 0.0, 0.0, [], None, [entry], [])


def problems(page: str, passage: Passage) -> list[str]:
    """Returns what is missing or out of order in a page after each of the two translations."""
    before = Contents(page)
    told = []
    for reverse in (False, True):
        texts = [reordered(each.text, reverse=reverse) for each in passage.sentences]
        after = Contents(passage.written(texts))
        way = "in reverse" if reverse else "in order"
        if reverse:
            same = (
                Counter(before.characters) == Counter(after.characters),
                Counter(before.markup) == Counter(after.markup),
            )
        else:
            same = before.characters == after.characters, before.markup == after.markup
        told += [
            f"{what} differs {way}" for what, fine in zip(("text", "markup"), same, strict=True) if not fine
        ]
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pages", type=int, default=50, help="number of pages")
    parser.add_argument("--model", type=Path, help="model folder to translate with")
    arguments = parser.parse_args()
    pages = arguments.folder.rglob("*.htm*")
    files = sorted(file for file in pages if file.suffix in (".htm", ".html") and file.is_file())
    if not files:
        parser.error(f"{arguments.folder}: no HTML page in it")
    model = None if arguments.model is None else econmt.load(arguments.model)
    how = division(splitter_for("en"), "de")
    failures = sentences = characters = 0
    begun = time.monotonic()
    chosen = files[:: max(1, len(files) // arguments.pages)][: arguments.pages]
    for file in chosen:
        page = file.read_text(encoding="utf-8", errors="replace").replace("\0", "")
        passage = html_passage(page, how)
        sentences, characters = sentences + len(passage.sentences), characters + len(page)
        told = problems(page, passage)
        if model is not None:
            told += missing(page, passage, model)
        failures += bool(told)
        for problem in told:
            print(f"{file}: {problem}")
    seconds = time.monotonic() - begun
    read = f"{len(chosen)} pages, {characters:,} characters, {sentences:,} sentences"
    print(f"{read}, {seconds:.1f} s; {failures} failed")
    return 1 if failures else 0


def missing(page: str, passage: Passage, model: econmt.api.TrainedModel) -> list[str]:
    """Returns what is missing in a page after a translation by a model."""
    found = model.translate([each.text for each in passage.sentences], beam_size=1)
    lost = Counter(Contents(page).markup) - Counter(Contents(passage.written(found)).markup)
    empty = sum(not each.text for each in found)
    return [f"missing {tag}" for tag in lost] + ([f"{empty} empty translations"] if empty else [])


if __name__ == "__main__":
    sys.exit(main())
