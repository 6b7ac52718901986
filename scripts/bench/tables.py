"""Compares tables of pages with those that code makes.

    python -m scripts.bench tables
    python -m scripts.bench tables filters --data-dir corpora --write

With --write the pages get what differs. Each table stands between two comments in its page, <!-- table NAME --> and
<!-- end of table -->. Without names all are made that need no text; those that need some are made if they are named.
Returns 1 if a table differs from its page.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from econmt.errors import InputError
from scripts.bench import table_rows
from scripts.bench.frame import ROOT, Bench

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


class DocumentTable(NamedTuple):
    """Table of a page.

    Attributes:
        page: Markdown file, relative to the project's folder.
        rows: Function that makes the rows, or lines to quote; it is called with the folder of the text if it needs one.
        needs_text: True if it needs text that is not generated.
        takes_long: True if it takes ten seconds or more without such text.
        tolerance: Largest relative difference of a number that is not reported; for figures that rounding changes.
    """

    page: str
    rows: Callable[..., Iterable[Sequence[str] | str]]
    needs_text: bool = False
    takes_long: bool = False
    tolerance: float = 0.0

    def lines(self, data: Path | None) -> list[str]:
        """Makes the lines of the page; ``data`` is the folder of the text."""
        rows = list(self.rows(data) if self.needs_text else self.rows())
        texts = [row for row in rows if isinstance(row, str)]
        return (
            ["```", *texts, "```"] if texts else markdown([row for row in rows if not isinstance(row, str)])
        )


def markdown(rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table whose first row are the headings."""
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in rows]
    lines.insert(1, "|" + "---|" * (lines[0].count("|") - 1))
    return lines


TABLES = {
    "techniques": DocumentTable("docs/memory.md", table_rows.technique_rows, takes_long=True),
    "stash": DocumentTable("docs/results/memory.md", table_rows.stash_rows),
    "fit": DocumentTable("docs/results/gpu.md", table_rows.fit_rows, takes_long=True),
    "sizes": DocumentTable("docs/results/inference.md", table_rows.size_rows),
    "ranks": DocumentTable("docs/low-rank.md", table_rows.rank_rows),
    "quickstart": DocumentTable(
        "docs/getting-started.md", table_rows.quickstart_rows, takes_long=True, tolerance=0.5
    ),
    "filters": DocumentTable("docs/data.md", table_rows.filter_rows, needs_text=True),
}
"""All tables, by the names in their pages."""


def region(text: str, name: str) -> re.Match[str]:
    """Returns the part of a page's text that is a table; the group is its lines."""
    match = re.search(rf"<!-- table {re.escape(name)} -->\n\n(.*?)\n\n<!-- end of table -->", text, re.DOTALL)
    if match is None:
        raise InputError(
            f"no page has <!-- table {name} --> and <!-- end of table -->; put both into its page"
        )
    return match


def differences(before: Sequence[str], after: Sequence[str], tolerance: float) -> list[str]:
    """Returns the lines that differ, as a diff; numbers may differ by ``tolerance``, relative to the larger."""
    if len(before) == len(after) and all(map(partial(_alike, tolerance), before, after)):
        return []
    return list(difflib.unified_diff(before, after, "page", "code", lineterm="", n=0))


def _alike(tolerance: float, before: str, after: str) -> bool:
    if tolerance == 0.0 or _NUMBER.sub("", before) != _NUMBER.sub("", after):
        return before == after
    numbers = [
        [float(number.replace(",", "")) for number in _NUMBER.findall(line)] for line in (before, after)
    ]
    return all(
        abs(old - new) <= tolerance * max(abs(old), abs(new)) for old, new in zip(*numbers, strict=True)
    )


def compare(name: str, data: Path | None, root: Path = ROOT, *, write: bool = False) -> list[str]:
    """Makes a table and returns how it differs from its page, which then gets it if ``write`` is true."""
    table = TABLES[name]
    path = root / table.page
    text = path.read_text(encoding="utf-8")
    match = region(text, name)
    lines = table.lines(data)
    changes = differences(match[1].splitlines(), lines, table.tolerance)
    if changes and write:
        joined = "\n".join(lines)
        path.write_text(text[: match.start(1)] + joined + text[match.end(1) :], encoding="utf-8")
    return changes


def main(words: Sequence[str] | None = None) -> int:
    bench = Bench(__doc__)
    add = bench.add_argument
    add("names", nargs="*", metavar="NAME", help=f"some of {', '.join(TABLES)}")
    add("--write", action="store_true", help="write tables that differ into their pages")
    add("--data-dir", type=Path, help="folder in which text is looked up")
    given = bench.begin(words)
    unknown = [name for name in given.names if name not in TABLES]
    if unknown:
        bench.error(f"no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
    names = given.names or [name for name, table in TABLES.items() if not table.needs_text]
    different = False
    for name in names:
        changes = compare(name, given.data_dir, write=given.write)
        different = different or bool(changes)
        state = "as in the page" if not changes else "written" if given.write else "differs"
        print(f"{name}: {TABLES[name].page}: {state}", *changes, sep="\n", flush=True)
    return int(different and not given.write)
