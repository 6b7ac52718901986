"""Writes English-French text from the laws of Canada.

Source is the repository justicecanada/laws-lois-xml of the Department of Justice (Open Government Licence - Canada),
which has every act and regulation as XML in both languages.

    git clone --depth 1 https://github.com/justicecanada/laws-lois-xml
    python -m scripts.bench make-laws laws-lois-xml laws-en-fr
    econmt train laws-en-fr

Writes train, valid and test, each as .en and .fr with one text a line: a section, a subsection, a paragraph, a
marginal note, a heading. Texts are paired by the labels of all sections that they are in; definitions, whose order is
alphabetical in each language, by their two terms. Validation and test text are from documents of their own, and no line
of theirs, in either language, is in the training text.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element

from econmt.errors import InputError
from scripts.bench.frame import Bench
from scripts.bench.splits import Row, Splits, is_similar, shuffled

LANGUAGES = ("en", "fr")
HELD_OUT_PAIRS = 2000
"""Pairs of the validation and of the test text."""
_FOLDERS = {"eng/acts/": "fra/lois/", "eng/regulations/": "fra/reglements/"}
_NAMES = {"SOR-": "DORS-", "SI-": "TR-", "C.R.C.,_c._": "C.R.C.,_ch._"}
"""Beginnings of the names of regulations in English and in French."""
_TEXTS = {"Text", "MarginalNote", "TitleText", "LongTitle", "ShortTitle"}
"""Elements whose text is a line."""
_LEFT_OUT = {"HistoricalNote", "RecentAmendments", "OriginatingRef", "Footnote", "FootnoteRef", "Note"}
_LEFT_OUT |= {"SignatureBlock", "ImageGroup", "Formula", "Leader", "LeaderRightJustified"}
_LEFT_OUT |= {"TableGroup", "List", "BilingualGroup"}
"""Elements that are no running text, and lists, which may be in the order of a language's alphabet."""
_TERMS = ("DefinedTermEn", "DefinedTermFr")
_OTHER_TERM = "\N{OBJECT REPLACEMENT CHARACTER}"
_IN_BRACKETS = re.compile(rf"\s*\([^()]*{_OTHER_TERM}[^()]*\)|{_OTHER_TERM}")
_NO_LABEL = re.compile(r"[\W_]+")


def documents(folder: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns pairs of names of English and French files, in the order of a hash, and files without a translation."""
    names = {
        path.relative_to(folder).as_posix()
        for name in chain(*_FOLDERS.items())
        for path in (folder / name).rglob("*.xml")
    }
    pairs = [(name, french) for name in shuffled(names) if (french := french_path(name)) in names]
    return pairs, sorted(names.difference(*pairs))


def french_path(english: str) -> str | None:
    """Returns the name of the French file of an English one; None for other files."""
    for folder, french in _FOLDERS.items():
        name = english.removeprefix(folder)
        if name != english and name.endswith(".xml"):
            beginning = next((each for each in _NAMES if name.startswith(each)), "")
            return french + _NAMES.get(beginning, "") + name.removeprefix(beginning)
    return None


def parse(content: bytes, path: str, language: str) -> Element:
    """Returns the tree of a document, reduced to its labels, terms and texts.

    Raises:
        InputError: if the content is not valid XML or declares entities; the message names ``path``.
    """
    if b"<!ENTITY" in content:
        raise InputError(f"{path}: declares entities, which is not allowed; remove the declarations")
    other_term = _TERMS[language == "en"]
    root = None
    try:
        for _, element in ET.iterparse(io.BytesIO(content)):  # noqa: S314  entities are refused
            _reduce(element, other_term)
            root = element
    except ET.ParseError as error:
        raise InputError(f"{path}: not valid XML: {error}") from error
    assert root is not None, "a document without elements is not valid XML"
    return root


def _reduce(element: Element, other_term: str) -> None:
    """Replaces what is in a text, a label or a term by its characters; empties elements that are left out."""
    element.attrib.clear()
    if element.tag in _LEFT_OUT:
        element.clear()
    elif element.tag in _TEXTS:
        terms = [child for child in element.iter() if child.tag in _TERMS]
        text = "" if element.find(".//Repealed") is not None else _characters(element, other_term)
        element[:] = terms  # they name a definition
        element.text = " ".join(_IN_BRACKETS.sub("", text).split())
    elif element.tag == "Label" or element.tag in _TERMS:
        element.text = "".join(element.itertext())
        element[:] = []


def _characters(element: Element, other_term: str) -> str:
    """Returns the characters of an element; of each term in the other language a character that marks it."""
    parts = [element.text or ""]
    for child in element:
        parts.append(_OTHER_TERM if child.tag == other_term else _characters(child, other_term))
        parts.append(child.tail or "")
    return "".join(parts)


def pairs_of(english: Element, french: Element) -> Iterator[Row]:
    """Yields the texts of two reduced elements that stand at the same place.

    Children belong together if they have the same tag and label, or the same terms, or stand after the same label;
    where one language has more of them than the other, none of them does.
    """
    groups = _groups(french)
    for key, children in _groups(english).items():
        translations = groups.get(key, [])
        if len(children) != len(translations):
            continue
        texts = [pair for each in zip(children, translations, strict=True) for pair in _pairs_at(*each)]
        # Lists without labels whose order differs.
        if len(children) == 1 or key[-1] or all(is_similar(pair) for pair in texts):
            yield from texts


def _pairs_at(english: Element, french: Element) -> Iterator[Row]:
    if english.tag in _TEXTS:
        yield english.text or "", french.text or ""
    else:
        yield from pairs_of(english, french)


def _groups(element: Element) -> dict[tuple[str, ...], list[Element]]:
    """Returns the children by what identifies them, which is empty at its end for those without label and terms."""
    groups: dict[tuple[str, ...], list[Element]] = {}
    last = ""
    for child in element:
        label = _NO_LABEL.sub("", child.findtext("Label") or "").lower()
        if label:
            last = label
            key: tuple[str, ...] = (child.tag, label)
        elif child.tag == "Definition":
            text = child.find("Text")
            terms = (
                {}
                if text is None
                else {term.tag: (term.text or "").strip().lower() for term in reversed(text)}
            )
            key = (child.tag, *(terms.get(name, "") for name in _TERMS), "terms" if len(terms) == 2 else "")
        else:
            key = (child.tag, last, "")
        groups.setdefault(key, []).append(child)
    return groups


def is_useful(pair: Row) -> bool:
    """Returns True for two different texts of similar lengths that have letters."""
    has_letters = all(any(character.isalpha() for character in side) for side in pair)
    return has_letters and pair[0] != pair[1] and is_similar(pair)


def why_not(pair: Row) -> str:
    """Returns why a pair is not used; an empty text if it is."""
    if not all(pair):
        return "empty or repealed on a side"
    return "" if is_useful(pair) else "without words, alike, or of unlike lengths"


def make(checkout: Path, folder: Path, size: int = HELD_OUT_PAIRS) -> Iterator[str]:
    """Writes the text, and yields the lines to print.

    Args:
        checkout: checkout of laws-lois-xml. folder: folder to write.
        size: number of pairs of the validation and of the test text.
    """
    found, alone = documents(checkout)
    with Splits(folder, LANGUAGES, size, why_not) as splits:
        for names in found:
            trees = (
                parse((checkout / name).read_bytes(), name, language)
                for name, language in zip(names, LANGUAGES, strict=True)
            )
            splits.add(list(pairs_of(*trees)))
    if not splits.counts["train"]:
        raise InputError(
            f"{checkout}: {len(found):,} documents in both languages give no training text beside "
            f"{splits.counts['valid']:,} pairs for validation and {splits.counts['test']:,} for the test"
        )
    yield f"{checkout}: {len(found):,} documents in both languages"
    yield from (f"{path}: has no translation, left out" for path in alone)
    for split, count in splits.counts.items():
        yield f"{folder / split}: {count:,} pairs"
    yield "training text: {:,} English and {:,} French words".format(*splits.words)
    yield from (f"left out: {count:,} pairs {reason}" for reason, count in splits.left_out.items())


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__)
    add = bench.add_argument
    add("checkout", type=Path, help="checkout of github.com/justicecanada/laws-lois-xml")
    add("folder", type=Path, help="folder to write")
    given = bench.begin(words)
    for line in make(given.checkout, given.folder):
        print(line, file=sys.stderr)
