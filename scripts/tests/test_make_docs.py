"""``python -m scripts.bench make-docs`` and ``docs-scores``: text of documentation in several languages."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from scripts.bench.docs_formats import anchor_of, messages, plain_markdown, plain_message, text_of_markdown
from scripts.bench.make_docs import Commit, make, rows_of, source_of, why_not
from scripts.bench.splits import Splits, shuffled
from tests.unit.cli.conftest import Call

ENGLISH = """---
title: "Lamps | Docs"
ms.date: "1/2/2017"
---
# Oil Lamps
[!INCLUDE[lamp](../includes/lamp.md)] burns **brightly** in the
  [dark](night.md#hour "Night") room.

## Care
-   Trim the `wick` \\<every day>.
    1.  Use scissors.
> [!NOTE]
> It is hot.
```
lamp --light
```
| Part | Meaning |
|:---|---|
| wick | It draws the oil up. |

## See Also
Clean the glass with 10 drops.
Keep it dry.

## Only English
A line alone.
"""
GERMAN = """---
title: Lampen
ms.translationtype: HT
---
# <a name="oil-lamps"></a>\u00d6llampen
[!INCLUDE[lamp](../includes/lamp.md)] brennt **hell** im [dunklen](night.md#hour) Zimmer.

## <a name="care"></a>Pflege
-   K\u00fcrzen Sie den `Docht` \\<jeden Tag>.
    1.  Nehmen Sie eine Schere.
> [!NOTE]
> Sie ist hei\u00df.
```
lamp --leuchte
```
| Teil | Bedeutung |
|---|---|
| Docht | Er zieht das \u00d6l hoch. |

## <a name="see-also"></a>Siehe auch
Putzen Sie das Glas mit 20 Tropfen.

Halten Sie es trocken.
"""
PAIRS = [
    ("Oil Lamps", "\u00d6llampen"),
    ("The lamp burns brightly in the dark room.", "Die Lampe brennt hell im dunklen Zimmer."),
    ("Care", "Pflege"),
    ("Trim the wick <every day>.", "K\u00fcrzen Sie den Docht <jeden Tag>."),
    ("Use scissors.", "Nehmen Sie eine Schere."),
    ("It is hot.", "Sie ist hei\u00df."),
    ("Part", "Teil"),
    ("Meaning", "Bedeutung"),
    ("wick", "Docht"),
    ("It draws the oil up.", "Er zieht das \u00d6l hoch."),
]
"""All pairs; the last common section has a paragraph in English and two in German."""


def pairs_of(english: str, german: str, included: dict[str, str]) -> list[tuple[str, ...]]:
    texts = {"en": text_of_markdown(english.encode(), included.get)}
    texts["de"] = text_of_markdown(german.encode(), dict.fromkeys(included, "Die Lampe").get)
    found = {language: text for language, text in texts.items() if text is not None}
    return list(rows_of(found, ["en", "de"], Counter()))


def test_markdown_is_paired_by_anchors_and_structure() -> None:
    assert pairs_of(ENGLISH, GERMAN, {"../includes/lamp.md": "The lamp"}) == PAIRS
    # An edited paragraph is no pair, and neither is one that includes what is not found.
    edited = ENGLISH.replace("Trim the `wick`", "Trim the [wick](w.md)").replace("hot.", "hot: 90 degrees")
    assert pairs_of(edited, GERMAN, {}) == [PAIRS[number] for number in (0, 2, 4, 6, 7, 8, 9)]
    assert pairs_of(ENGLISH, GERMAN.replace(": HT", ": MT"), {}) == []


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("see [the *big* page](a_(b).md) and ![alt](x.png)", "see the big page and "),
        ("[![alt](x.png)](y.md)word", "word"),
        ("a\\_b_c_d __bold__ _it_ &amp; <br/>5 \\* 6", "a_b_c_d bold it &  5 * 6"),
        ("[text][ref] [!NOTE]", "text [!NOTE]"),
    ],
)
def test_marks_of_markdown_are_removed(text: str, plain: str) -> None:
    assert plain_markdown(text) == plain


def test_anchors_are_those_of_the_website() -> None:
    assert anchor_of('<a name="Trim"></a> Docht') == "trim"
    assert anchor_of("A. Using `GO` (Transact-SQL)") == "a-using-go-transact-sql"


CATALOGUE = """#, fuzzy
msgid ""
msgstr "Language: de\\n"

#: lamp.rst:1
msgid "Call :func:`~lamp.light` or see :ref:`the \\"index\\" <genindex>`, ``wick`` and `x <https://a.b>`_."
msgstr "Rufe :func:`~lamp.light` auf, "
"siehe :ref:`den Index <genindex>`, ``wick`` und `x <https://a.b>`_."

#, fuzzy
msgid "unsure"
msgstr "unsicher"

msgid "one"
msgid_plural "many"
msgstr[0] "eins"

msgid "lamp\\n  light"
msgstr "lampe\\n  leuchte"

msgid "missing"
msgstr ""
"""


def test_catalogues_give_certain_messages() -> None:
    ((message, translation),) = messages(CATALOGUE.encode())
    assert plain_message(message) == 'Call lamp.light or see the "index", wick and x.'
    assert plain_message(translation) == "Rufe lamp.light auf, siehe den Index, wick und x."


@pytest.mark.parametrize(
    ("text", "language", "reason"),
    [
        ("12 + 3", "en", "texts without letters"),
        ("word " * 100, "en", ""),
        ("word " * 101, "en", "texts of more than 100 words"),
        ("\u8a9e" * 200, "zh", "texts of more than 100 words"),
        ("lamp", "ja", "texts in another script than their language's"),
        ("\u043b\u0430\u043c\u043f\u0430", "de", "texts in another script than their language's"),
        ("\u30e9\u30f3\u30d7", "ja", ""),
    ],
)
def test_texts_that_are_not_used(text: str, language: str, reason: str) -> None:
    assert why_not(text, language) == reason


def page(language: str, *texts: str) -> str:
    """Makes a page of help with a paragraph for each text, and one without an id."""
    paragraphs = "".join(f'<p id="par_{n}" class="x">{text}</p>' for n, text in enumerate(texts))
    return f'<html lang="{language}"><p>menu</p><h1 id="hd_1">H <i>{language}</i></h1>{paragraphs}</html>'


LACKING = int(shuffled(f"help:sub/{number}.html" for number in range(9))[-1][9])
"""Number of the page that French lacks: the last one, which is in the training text."""
WORDS = {
    "en": "The lamp {} is number {}",
    "de": "Die Lampe {} ist Nummer {}",
    "fr": "La lampe {} a le numero {}",
}


@pytest.fixture
def help_pages(tmp_path: Path) -> list[str]:
    """Writes eight pages in three languages, one page that French lacks, and a text that two pages share."""
    for language, words in WORDS.items():
        for number in range(9):
            texts = [words.format(number, part) for part in range(2)]
            file = tmp_path / language / "sub" / f"{number}.html"
            file.parent.mkdir(parents=True, exist_ok=True)
            if language != "fr" or number != LACKING:
                shared = words.format("x", "y")
                file.write_text(page(language, *texts, shared, "Never translated at all"), encoding="utf-8")
    return [f"help:{language}={tmp_path / language}" for language in WORDS]


def read(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text(encoding="utf-8").splitlines()


def test_held_out_files_are_the_same_in_all_languages(tmp_path: Path, help_pages: list[str]) -> None:
    folder = tmp_path / "text"
    lines = list(make(folder, [source_of(each) for each in help_pages], 4))
    splits = ("valid", "test", "train")
    rows = {
        name: list(zip(*(read(folder, f"{name}.{each}") for each in WORDS), strict=True)) for name in splits
    }
    assert (len(rows["valid"]), len(rows["test"])) == (4, 4)
    held_out = [row for split in ("valid", "test") for row in rows[split]]
    assert all(all(row) for row in held_out)
    assert all(text not in row for kept in held_out for text in kept for row in rows["train"])
    # The page that French lacks is in training, without French.
    assert (f"The lamp {LACKING} is number 0", f"Die Lampe {LACKING} ist Nummer 0", "") in rows["train"]
    assert "help of fr: files: 8" in lines
    assert "help of fr: files not found that another language has: 1" in lines
    assert len([line for line in lines if "in the validation or test text" in line]) == 1
    sides = ((read(folder, f"to-{each}.src"), read(folder, f"to-{each}.trg")) for each in WORDS)
    pairs = [frozenset(pair) for both in sides for pair in zip(*both, strict=True)]
    expected = {frozenset(pair) for row in rows["train"] for pair in combinations(row, 2) if all(pair)}
    assert (set(pairs), len(pairs)) == (expected, len(expected))
    assert not any("Never translated at all" in pair for pair in pairs)
    lists = [read(folder, f"test-all.{suffix}") for suffix in ("src", "trg", "directions")]
    assert lists[0][0] == f"<2de> {rows['test'][0][0]}"
    assert (lists[1][0], lists[2][0]) == (rows["test"][0][1], "en-de")
    assert [len(each) for each in lists] == [6 * 4] * 3


def test_held_out_rows_are_evenly_from_a_document_and_words_are_counted_by_language(tmp_path: Path) -> None:
    with Splits(tmp_path, ["en", "de"], 3, most=3) as splits:
        for _ in range(4):
            splits.add([(f"one two three {number}", f"eins {number}") for number in range(7)])
    held_out = [
        [int(line[-1]) for line in read(tmp_path, f"{name}.en")] for name in ("valid", "test", "train")
    ]
    assert held_out == [[0, 3, 6], [1, 4, 2], [5]]
    assert splits.words == [4, 2]


def test_a_perfect_translation_scores_100(tmp_path: Path, help_pages: list[str], bench: Call) -> None:
    made = bench("make-docs", tmp_path / "text", *help_pages, "--held-out", "4")
    assert made.code == 0, made.err
    prefix = tmp_path / "text" / "test-all"
    ended = bench("docs-scores", prefix, f"{prefix}.trg")
    assert ended.code == 0, ended.err
    assert ended.out.count(" 100 ") == 2 * (6 + 1)
    (tmp_path / "short").write_text("a\n", encoding="utf-8")
    ended = bench("docs-scores", prefix, tmp_path / "short")
    assert (ended.code, "has 1 lines, but" in ended.err) == (2, True)


def test_commits_are_read_by_date(tmp_path: Path) -> None:
    for day, text in (("2017-01-01", "old"), ("2018-01-01", "new")):
        (tmp_path / "a.md").write_text(text, encoding="utf-8")
        when = os.environ | {"GIT_COMMITTER_DATE": f"{day}T00:00:00Z"}
        for words in (["init", "-q"], ["add", "a.md"], ["commit", "-q", "-m", text]):
            command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
            subprocess.run(command, cwd=tmp_path, env=when, check=True)
    for revision, content in (("2017-06-01", b"old"), ("HEAD", b"new")):
        commit = Commit(tmp_path, revision)
        assert (commit.names(), commit.read("a.md"), commit.read("b.md")) == (["a.md"], content, None)
        commit.close()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("html:de=x", "html:de=x: write markdown:LANGUAGE=PATH"),
        ("help:de=no-such-folder", "no-such-folder: no such folder"),
        ("markdown:de=.@no-such-branch", ".: no commit no-such-branch"),
    ],
)
def test_bad_sources_are_told(tmp_path: Path, bench: Call, source: str, problem: str) -> None:
    ended = bench("make-docs", tmp_path / "text", source)
    assert (ended.code, problem in ended.err) == (2, True)
