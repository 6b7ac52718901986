"""Tables of the documentation that follow from the code are those that the code makes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from econmt.errors import InputError
from scripts.bench import table_rows, tables
from scripts.bench.tables import TABLES, DocumentTable
from tests.conftest import ROOT

PAGE = (
    "# Page\n\n<!-- table sizes -->\n\n| a | b |\n|---|---|\n| 1 | 20 |\n\n<!-- end of table -->\n\nText.\n"
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.thorough] * table.takes_long + [pytest.mark.slow] * (name == "stash")
        )
        for name, table in TABLES.items()
        if not table.needs_text
    ],
)
def test_a_page_has_the_table_that_the_code_makes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # as in the program that writes the tables
    assert tables.compare(name, None) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if table.needs_text])
def test_a_page_has_the_table_of_a_text(name: str) -> None:
    folder = os.environ.get("ECONMT_DATA")
    if folder is None:
        pytest.skip("ECONMT_DATA names no folder of texts")
    if name == "filters":
        pytest.importorskip("py3langid")
    assert tables.compare(name, Path(folder)) == []


def test_every_table_of_a_page_is_known_and_stands_where_it_belongs() -> None:
    pages = {
        name: str(page.relative_to(ROOT))
        for page in ROOT.glob("docs/**/*.md")
        for name in re.findall(r"<!-- table (\S+) -->", page.read_text(encoding="utf-8"))
    }
    assert pages == {name: table.page for name, table in TABLES.items()}


@pytest.mark.parametrize(
    ("after", "tolerance", "alike"),
    [
        (["| x | 1,000 |"], 0.0, True),
        (["| x | 1,001 |"], 0.0, False),
        (["| x | 1,001 |"], 0.01, True),
        (["| x | 1,010 |"], 0.00995, True),  # of the larger
        (["| x | 1,020 |"], 0.01, False),
        (["| y | 1,000 |"], 0.01, False),
        (["| x | 1,000 |", "| x | 1,000 |"], 0.01, False),
        ([], 0.01, False),
    ],
)
def test_differences_beyond_the_tolerance_are_listed(after: list[str], tolerance: float, alike: bool) -> None:
    changes = tables.differences(["| x | 1,000 |"], after, tolerance)
    assert (changes == []) == alike
    if not alike and after:
        assert changes[-1] == f"+{after[-1]}"


def test_markdown_has_a_rule_below_the_headings_and_empty_cells() -> None:
    assert [table_rows._less(before, 100) for before in (999, 1000)] == ["9.99x", "10.0x"]
    assert tables.markdown([("a", "b", "c"), ("", "", "3")]) == [
        "| a | b | c |",
        "|---|---|---|",
        "| | | 3 |",
    ]


def _one_table(monkeypatch: pytest.MonkeyPatch, page: Path, rows: list[tuple[str, ...]]) -> None:
    monkeypatch.setitem(TABLES, "sizes", DocumentTable(page.name, lambda: rows))


def test_a_table_that_differs_is_written_into_its_page_if_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    _one_table(monkeypatch, page, [("a", "b"), ("1", "30")])
    changes = tables.compare("sizes", None, tmp_path)
    assert changes[-2:] == ["-| 1 | 20 |", "+| 1 | 30 |"]
    assert page.read_text(encoding="utf-8") == PAGE
    assert tables.compare("sizes", None, tmp_path, write=True) == changes
    assert page.read_text(encoding="utf-8") == PAGE.replace("20", "30")
    assert tables.compare("sizes", None, tmp_path) == []
    with pytest.raises(InputError, match="no page has <!-- table other -->"):
        tables.region(PAGE, "other")


@pytest.mark.parametrize(
    ("words", "code", "state"),
    [
        (["sizes"], 0, "as in the page"),
        (["ranks", "sizes"], 1, "differs"),
        (["ranks", "--write"], 0, "written"),
        (["missing"], 2, "no table missing"),
        ([], 1, "fit: docs"),
    ],
)
def test_the_exit_code_tells_whether_a_table_differs(
    words: list[str],
    code: int,
    state: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tables, "compare", lambda name, *_, **__: ["+other"] if name == "ranks" else [])
    try:
        result = tables.main(words)
    except SystemExit as end:
        result = end.code
    assert result == code
    told = "".join(capsys.readouterr())
    assert state in told
    assert "filters: " not in told, "which needs a text"
