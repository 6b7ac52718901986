"""Tables fit where they are printed, and nothing of them is lost."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from econmt_memory.report.layout import fitted, print_table


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as captured:
        print_table(console, table)
    return captured.get().splitlines()


def wide(columns: int, cell: str = "1,234.5 MB") -> Table:
    table = Table(title="a table of many figures")
    for number in range(columns):
        table.add_column(f"column number {number}", justify="right")
    for row in range(3):
        table.add_row(*(f"{cell} {row}" for _ in range(columns)), end_section=row == 1)
    return table


def test_a_table_that_fits_is_left_alone() -> None:
    table = wide(2)
    assert fitted(table, 80) is table


@pytest.mark.parametrize("columns", [2, 5, 6, 9, 14])
@pytest.mark.parametrize("width", [80, 120])
def test_every_cell_and_head_is_there(columns: int, width: int) -> None:
    lines = printed(wide(columns), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "a table of many figures" in text
    parts = text.count("1,234.5 MB 0") - columns  # each further part begins with the first column again
    assert parts == {(9, 80): 1, (14, 80): 2, (14, 120): 1}.get((columns, width), 0)
    for row in range(3):
        assert text.count(f"1,234.5 MB {row}") == columns + parts
    for number in range(1, columns):
        assert str(number) in text


@pytest.mark.parametrize(("names", "key"), [(("a", "b", "c"), "a b c"), (("a", "a", "b"), "1 2 3")])
def test_columns_that_do_not_fit_stand_below(names: tuple[str, ...], key: str) -> None:
    table = wide(8)
    table.columns[0].justify = "left"
    table.columns[0]._cells[:] = names
    for column in table.columns[1:]:  # so that only numbers tell rows with one name apart
        column._cells[:] = ["1.5 " + "x" * 12, "1.5 " + "x" * 12, "2.5 " + "x" * 12]
    lines = printed(table, 80)
    assert lines[0] == "a table of many figures"
    gap = lines.index("")
    for part in (lines[:gap], lines[gap:]):
        assert [line.split()[0] for line in part if line.strip()][-3:] == key.split()
    assert "".join(lines).count("1.5 xxx") == 2 * 7


def test_long_texts_are_wrapped_inside_their_column() -> None:
    table = Table("step", "what it is", "seconds", title="steps")
    table.add_row("first", "word " * 20, "3")
    lines = printed(table, 80)
    assert lines[0] == "steps"
    assert [line.split() for line in lines[-2:]] == [["first", *["word"] * 13, "3"], ["word"] * 7]


def test_a_long_word_is_no_wider_than_the_console() -> None:
    table = Table("path")
    table.add_row("x" * 200)
    assert max(map(len, printed(table, 80))) <= 80


def test_what_all_rows_share_is_told_once() -> None:
    table = Table("operation", "processor", "nothing", "milliseconds", title="times")
    for number in range(2):
        table.add_row(f"product {number}", "a processor with a name that is long " * 2, "", f"{number}.5")
    lines = printed(table, 80)
    text = " ".join(" ".join(lines).split())
    assert text.startswith("times, processor a processor with a name that is long")
    assert text.count("a processor with") == 2
    assert lines[-1].split() == ["product", "1", "1.5"]
