"""Texts of documentation by the place at which they stand: markdown, LibreOffice's help, gettext catalogues."""

from __future__ import annotations

import hashlib
import html
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser

Texts = dict[tuple[object, ...], str]
"""Texts of a file by the place at which they stand."""

_INCLUDE = re.compile(r"\[!INCLUDE\s*\[[^\]]*\]\(([^)]*)\)\]", re.IGNORECASE)
_ANCHOR = re.compile(r"<a\s+(?:name|id)\s*=\s*\"?([^\">]*)\"?\s*/?>\s*(?:</a>)?", re.IGNORECASE)
_HEADING = re.compile(r"(#{1,6})\s*(.*?)\s*#*$")
_FENCE = re.compile(r"(`{3,}|~{3,})")
_ITEM = re.compile(r"(?:[-*+]|\d{1,3}[.)])\s+")
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?:[^()]|\([^()]*\))*\)")
_STARS = re.compile(r"(?<!\\)(\*{1,3})(?=\S)(.+?)(?<=[^\s\\])\1")
_LINES = re.compile(r"(?<![\w\\])(_{1,2})(?=\S)(.+?)(?<=[^\s\\])\1(?!\w)")
_TAG = re.compile(r"(?<!\\)</?[a-zA-Z][^<>]*>|<!--.*?-->")
_ROLE = re.compile(r"(?<![\w`]):[\w:+.-]+:`!?~?([^`<]+?)(?:\s*<[^`>]*>)?`")
_HYPERLINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{1,2}")


def text_of_markdown(content: bytes, include: Callable[[str], str | None]) -> Texts | None:
    """Returns headings, paragraphs, list items and cells of tables.

    Their places are the anchor of the heading, how often it occurred, the kinds of all blocks of the section, the
    number of the block, its number of links, and its numbers of two digits and more: blocks of which one was edited
    later than the other differ there.

    Args:
        content: the file.
        include: returns the text of a file that the text includes; None if there is none.

    Returns:
        None for a file that is marked as translated by machines.
    """
    front, lines = front_matter(content.decode("utf-8-sig", errors="replace"))
    if re.search(r"^ms\.translationtype:\s*MT", front, re.MULTILINE):
        return None
    texts: Texts = {}
    seen: Counter[str] = Counter()
    for anchor, blocks in _sections(lines):
        seen[anchor] += 1
        structure = hashlib.sha256(" ".join(kind for kind, _ in blocks).encode()).digest()[:8]
        for position, (_, text) in enumerate(blocks):
            # The odd ones are what the text includes.
            parts = [include(part) if n % 2 else part for n, part in enumerate(_INCLUDE.split(text))]
            if text and None not in parts:
                plain = plain_markdown("".join(filter(None, parts)))
                numbers = tuple(sorted(re.findall(r"\d\d+", plain)))
                place = (anchor, seen[anchor], structure, position, len(_LINK.findall(text)), numbers)
                texts[place] = plain
    return texts


def front_matter(text: str) -> tuple[str, list[str]]:
    """Returns the metadata at the beginning of a text in markdown, and the lines below it."""
    match = re.match(r"---\s*\n(.*?)^---\s*$", text, re.DOTALL | re.MULTILINE)
    return (match[1], text[match.end() :].splitlines()) if match else ("", text.splitlines())


def _sections(lines: Sequence[str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields the anchors and blocks of sections; a block is its kind and its text, empty for code."""
    anchor, blocks = "", list[tuple[str, str]]()
    for kind, text in _blocks(lines):
        if kind.startswith("#"):
            yield anchor, blocks
            anchor, blocks = anchor_of(text), []
        blocks.append((kind, text))
    yield anchor, blocks


def anchor_of(heading: str) -> str:
    """Returns the anchor in a heading, or that which is made of its words."""
    names = _ANCHOR.findall(heading)
    if names:
        return str(names[0]).lower()
    words = plain_markdown(_INCLUDE.sub("", heading)).lower()
    return re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")


def _blocks(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields kind and text of each block: a heading (#, ##, ...), paragraph, item, cell or code."""
    kind, parts, fence, was_quote = "", list[str](), "", False
    for raw in itertools.chain(lines, [""]):
        line = raw.strip()
        is_quote = line.startswith(">")
        if is_quote and not was_quote and parts:
            yield kind, " ".join(parts)
            kind, parts = "", []
        was_quote = is_quote
        line = line.lstrip("> ")
        if fence:
            fence = "" if line.startswith(fence) and not line.strip(fence[0]) else fence
            continue
        heading, opening, item = _HEADING.match(line), _FENCE.match(line), _ITEM.match(line)
        if line and not (heading or opening or item or line.startswith("|")):
            kind = kind or "paragraph"
            parts.append(line)
            continue
        if parts:
            yield kind, " ".join(parts)
        kind, parts = "", []
        if opening:
            fence = opening[1]
            yield "code", ""
        elif heading:
            yield heading[1], heading[2]
        elif item:
            kind, parts = "item", [line[item.end() :]]
        elif line and not re.fullmatch(r"[|:\-\s]+", line):
            yield from (("cell", cell.strip()) for cell in re.split(r"(?<!\\)\|", line.strip("|")))


def plain_markdown(text: str) -> str:
    """Returns a text without marks: of links their words, no images, no tags."""
    text = re.sub(r"^\[![A-Za-z]+\]", "", _ANCHOR.sub("", text))
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = _LINK.sub(r"\1", _LINK.sub(r"\1", text))
    text = re.sub(r"\[([^\[\]]+)\]\[[^\[\]]*\]", r"\1", text)
    text = _LINES.sub(r"\2", _STARS.sub(r"\2", _STARS.sub(r"\2", _TAG.sub(" ", text))))
    return html.unescape(re.sub(r"\\([\\`*_{}\[\]()#+\-.!|<>~&])", r"\1", text.replace("`", "")))


class _Paragraphs(HTMLParser):
    """Collects the characters of elements that have an id and are paragraphs or headings."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: Texts = {}
        self._id, self._tag, self._parts = "", "", list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        name = dict(attrs).get("id") or ""
        if name.startswith(("par_", "hd_")):
            self._id, self._tag, self._parts = name, tag, []

    def handle_endtag(self, tag: str) -> None:
        if self._id and tag == self._tag:
            self.texts[self._id,] = "".join(self._parts)
            self._id = ""

    def handle_data(self, data: str) -> None:
        self._parts.append(data)


def text_of_help(content: bytes) -> Texts:
    """Returns the paragraphs and headings of a page of LibreOffice's help by their ids."""
    parser = _Paragraphs()
    parser.feed(content.decode("utf-8", errors="replace"))
    return parser.texts


def messages(content: bytes) -> Iterator[tuple[str, str]]:
    """Yields messages and translations of a gettext catalogue, without uncertain ones."""
    for entry in content.decode("utf-8", errors="replace").replace("\r\n", "\n").split("\n\n"):
        values: dict[str, str] = {}
        key = ""
        for line in entry.split("\n"):
            if line.startswith("#"):
                key = "fuzzy" if line.startswith("#,") and "fuzzy" in line else key
                values.setdefault(key, "")
                continue
            name, _, quoted = line.partition('"')
            key = name.strip() or key
            values[key] = values.get(key, "") + _unquote(quoted.removesuffix('"'))
        message, translation = values.get("msgid", ""), values.get("msgstr", "")
        is_whole = message and translation and not values.keys() & {"fuzzy", "msgid_plural"}
        if is_whole and "\n" not in message:  # lines are kept apart in code and tables alone
            yield message, translation


def _unquote(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: {"n": "\n", "t": "\t"}.get(match[1], match[1]), text)


def plain_message(text: str) -> str:
    """Returns a message of Python's documentation without the marks of reStructuredText."""
    text = _HYPERLINK.sub(r"\1", _ROLE.sub(r"\1", text))
    return re.sub(r"\\(.)", r"\1", _STARS.sub(r"\2", text.replace("`", "")))
