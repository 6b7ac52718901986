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

import hashlib
import io
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element

from econmt.errors import InputError
from scripts.bench.frame import Bench

LANGUAGES = ("en", "fr")
HELD_OUT_PAIRS = 2000
"""Pairs of the validation and of the test text."""
PAIRS_OF_DOCUMENT = 100
"""Pairs at most that a document gives to the validation or test text; the rest of it is not used."""
WORDS_HELD_OUT = 4
"""English words at least of a held-out pair: shorter ones, such as headings, are the same in many documents."""
MAX_RATIO = 3.0
"""Characters of one side at most, relative to the other side."""
FREE_CHARACTERS = 10
"""Characters added to both sides before they are compared: short texts differ more."""

Pair = tuple[str, str]

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
    pairs = [(name, french) for name in names if (french := french_path(name)) in names]
    pairs.sort(key=lambda pair: hashlib.sha256(pair[0].encode()).digest())
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


def pairs_of(english: Element, french: Element) -> Iterator[Pair]:
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


def _pairs_at(english: Element, french: Element) -> Iterator[Pair]:
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


def is_similar(pair: Pair) -> bool:
    """Returns True if neither side is more than ``MAX_RATIO`` times as long as the other."""
    short, long = sorted(len(side) + FREE_CHARACTERS for side in pair)
    return long <= MAX_RATIO * short


def is_useful(pair: Pair) -> bool:
    """Returns True for two different texts of similar lengths that have letters."""
    has_letters = all(any(character.isalpha() for character in side) for side in pair)
    return has_letters and pair[0] != pair[1] and is_similar(pair)


def digest(text: str) -> int:
    """Returns a hash of 64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Splits:
    """Text files of the three splits, filled one after the other: validation, test, training.

    Args:
        folder: folder of the files.
        size: number of pairs of the validation and of the test text.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.counts = dict.fromkeys(("valid", "test", "train"), 0)
        self.words = [0, 0]
        """English and French words of the training text, as spaces divide it."""
        self.left_out: Counter[str] = Counter()
        """Pairs that are not in the training text, by reason."""
        self._folder, self._size = folder, size
        self._held_out: set[int] = set()

    def __enter__(self) -> Splits:  # noqa: PYI034  as above
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self._files = {
                (split, language): stack.enter_context(
                    (self._folder / f"{split}.{language}").open("w", encoding="utf-8", newline="\n")
                )
                for split in self.counts
                for language in LANGUAGES
            }
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, pairs: list[Pair]) -> None:
        """Adds the pairs of a document to the split that is being filled."""
        split = next((name for name in ("valid", "test") if self.counts[name] < self._size), "train")
        if split == "train":
            for pair in pairs:
                self._train(pair)
            return
        missing = self._size - self.counts[split]
        for pair in held_out(filter(is_useful, pairs), self._held_out)[:missing]:
            self._held_out.update(map(digest, pair))
            self._write(split, pair)

    def _train(self, pair: Pair) -> None:
        if not all(pair):
            self.left_out["empty or repealed on a side"] += 1
        elif not is_useful(pair):
            self.left_out["without words, alike, or of unlike lengths"] += 1
        elif not self._held_out.isdisjoint(map(digest, pair)):
            self.left_out["with a side that is in the validation or test text"] += 1
        else:
            self.words = [words + len(side.split()) for words, side in zip(self.words, pair, strict=True)]
            self._write("train", pair)

    def _write(self, split: str, pair: Pair) -> None:
        self.counts[split] += 1
        for language, side in zip(LANGUAGES, pair, strict=True):
            self._files[split, language].write(side + "\n")


def held_out(pairs: Iterable[Pair], seen: set[int]) -> list[Pair]:
    """Returns the pairs that a document gives to the validation or test text, evenly from all of it.

    Leaves out short ones and those with a side in ``seen``, a set of digests.
    """
    long = (pair for pair in pairs if len(pair[0].split()) >= WORDS_HELD_OUT)
    by_source = {pair[0]: pair for pair in long if seen.isdisjoint(map(digest, pair))}
    step = max(1, -(-len(by_source) // PAIRS_OF_DOCUMENT))
    return list(by_source.values())[::step]


def make(checkout: Path, folder: Path, size: int = HELD_OUT_PAIRS) -> Iterator[str]:
    """Writes the text, and yields the lines to print.

    Args:
        checkout: checkout of laws-lois-xml. folder: folder to write.
        size: number of pairs of the validation and of the test text.
    """
    found, alone = documents(checkout)
    with Splits(folder, size) as splits:
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
