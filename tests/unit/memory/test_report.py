"""Tables and data say what the ledgers say, and fit where they are printed."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console
from rich.table import Table

from econmt.estimate.fit import Fit
from econmt.estimate.report.data import fit_data, report_data
from econmt.estimate.report.report import (
    comparison_table,
    faster,
    fit_table,
    format_rate,
    layers_table,
    less,
    print_report,
    stash_table,
    summary,
)
from econmt_memory.measure.ledger import Ledger, Moment, OutsideMemory, TensorAtPeak
from econmt_memory.report.ledger_tables import (
    downsample,
    grouped,
    largest_table,
    ledger_table,
    maker,
    peak_moment,
)
from econmt_memory.report.tables import ReportTable, fitted, print_table, shape_text
from tests.unit.memory.samples import SHAPE, make_ledger, make_profile, make_report


def cells(table: ReportTable) -> list[list[str]]:
    """The printed rows of a table, a list of cells each, the head first."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table.for_terminal())
    rows = [re.split("[┃│]", line)[1:-1] for line in capture.get().splitlines() if line[:1] in "┃│"]
    return [[cell.strip() for cell in row] for row in rows]


def test_stash_and_times_by_layer() -> None:
    assert cells(layers_table(make_profile("reference", 1))) == [
        ["layer", "stash kB", "share", "forward ms", "backward ms", "optimizer ms"],
        ["attention", "6,000.0", "67 %", "3.0", "4.0", "0.0"],
        ["decoder", "3,000.0", "33 %", "1.0", "0.0", "0.0"],
        ["other", "", "0 %", "0.0", "0.0", "2.0"],
        ["all", "9,000.0", "100 %", "4.0", "4.0", "2.0"],
    ]


def test_summary_tells_speed_and_share_of_the_peak() -> None:
    peak = "peak 11.0 MB, in the backward phase; stash 9.0 MB"
    speed = (
        "10 ms a step, 8,000 target tokens/s, 300.0 MFLOP/s, 8 % of what a large matrix product reaches here"
    )
    assert summary(make_profile("reference", 1)) == [f"{peak}; measured", speed]
    fewer = make_profile("reference", 1, rows=2)
    assert layers_table(fewer).title == "stash and time by layer (time of 2 x 30 x 20)"
    assert summary(fewer) == [f"{peak}; estimated", f"{speed} (2 x 30 x 20)"]
    untimed = make_profile("reference", 1, timed=False)
    assert cells(layers_table(untimed))[1] == ["attention", "6,000.0", "67 %"]
    assert summary(untimed) == [f"{peak}; estimated"]


def test_summary_tells_the_allocator() -> None:
    profile = make_profile("reference", 1, timed=False)
    profile.bytes.allocated, profile.bytes.reserved = 12_000_000, 20_000_000
    assert summary(profile)[1] == "CUDA's allocator: 12.0 MB allocated, 20.0 MB reserved"
    assert not ledger_table(profile.bytes).below
    profile.bytes.outside = OutsideMemory(300_000_000, 150_000_000, 50_000_000)
    assert summary(profile)[2] == (
        "outside PyTorch's allocator: 500.0 MB (assumed: context 300.0 MB, libraries 150.0 MB, kernels and CUDA graphs "
        "50.0 MB)"
    )
    below = ledger_table(profile.bytes).below
    sizes = {"reserved, idle": 20_000_000 - profile.bytes.entries.total()}
    sizes |= {"outside torch": 500_000_000, "of the GPU": 520_000_000}
    assert {row[0]: row[-2] for row in below} == sizes
    assert {len(row) for row in below} == {len(ledger_table(profile.bytes).columns)}


def test_equal_tensors_stand_together() -> None:
    small = TensorAtPeak(10, (5, 2), "uint8", "workspace", "loss", "econmt.lstm aten.mm")
    large = small._replace(bytes=15)
    assert grouped([large, small, small]) == [(small, 2), (large, 1)]
    assert maker(small) == "mm in lstm"
    assert cells(largest_table(make_ledger(3)))[1:] == [
        ["18.0", "3 of 6.0 MB", "4 x 30 x 128", "float32", "feature maps", "attention", "tanh"],
        ["1.5", "1", "one value", "float32", "weights", "decoder", "code before the step"],
    ]
    assert largest_table(make_ledger(3)).title == "the 4 largest tensors at the peak, equal ones in one row"
    many = make_ledger()
    many.largest = [small._replace(bytes=size) for size in (9, *range(1, 20))]
    assert len(largest_table(many).rows) == 10
    assert largest_table(many).title.startswith("the 11 largest")


def test_a_technique_is_compared_in_its_own_precision() -> None:
    profiles = [make_profile(name, scale) for name, scale in (("reference", 8), ("reference, bfloat16", 4))]
    profiles += [make_profile("all, bfloat16", 1)]
    rows = cells(comparison_table(profiles))
    figures = ["stash MB", "change", "peak MB", "change", "target tokens/s", "change"]
    assert rows[0] == ["technique", *figures, "bytes"]
    assert rows[2][2:] == ["", "35.0", "", "2,000", "", "measured"]
    assert rows[3][2:] == ["4.00x less", "11.0", "3.18x less", "8,000", "4.00x", "measured"]
    # Without it there is nothing to compare with, and the other precision does not stand in.
    rows = cells(comparison_table([profiles[0], profiles[2]]))
    assert rows[2][2:] == ["", "11.0", "", "8,000", "", "measured"]


def test_a_technique_without_times_has_no_speed() -> None:
    rows = cells(comparison_table([make_profile("reference", 4, timed=False), make_profile("all", 1)]))
    assert rows[1][5:] == ["", "", "estimated"]
    assert rows[2][5:] == ["8,000", "", "measured"]
    head, *rows = cells(comparison_table([make_profile("reference", 40, timed=False)] * 2))
    assert head == ["technique", "stash MB", "change", "peak MB", "change", "bytes"]
    assert rows == [["reference", "360.0", "", "323.0", "", "estimated"]] * 2


def test_stash_by_layer_and_technique() -> None:
    rows = cells(stash_table([make_profile("reference", 4), make_profile("all", 1)]))
    assert rows[0] == ["technique", "attention MB", "decoder MB"]
    assert rows[1:] == [["reference", "24.0", "12.0"], ["all", "6.0", "3.0"]]


def test_largest_batches() -> None:
    reference = [Fit(10, 20, 3, 900), Fit(30, 40, 0, 5000)]
    table = fit_table({make_profile("reference", 1).technique: reference}, 1000)
    assert table.title == "largest batch in 1.0 kB (1,000 bytes)"
    assert cells(table) == [
        ["source", "target", "rows", "target tokens", "bytes"],
        ["10", "20", "3", "60", "900 B"],
        ["30", "40", "none", "", "1 row takes 5.0 kB"],
    ]
    names = ("reference", "all", "none", "reference, bfloat16", "all, bfloat16")
    first, lean, none, half, narrow = (make_profile(name, 1).technique for name in names)
    fits = {first: reference, lean: [Fit(10, 20, 64, 990), Fit(30, 40, 7, 990)]}
    fits[none] = [Fit(10, 20, 0, 5000)] * 2
    fits |= {half: [Fit(10, 20, 5, 990)] * 2, narrow: [Fit(10, 20, 60, 990)] * 2}
    assert cells(fit_table(fits, 1000)) == [
        ["source", "target", "reference", "all", "change", "none", "change", *names[3:], "change"],
        ["10", "20", "3", "64", "21.3x", "none", "", "5", "60", "12.0x"],
        ["30", "40", "none", "7", "", "none", "", "5", "60", "12.0x"],
    ]
    row = fit_data(fits, 1000)["techniques"]["reference"][1]
    assert row == {"source": 30, "target": 40, "rows": 0, "bytes": 5000}


def test_words() -> None:
    changes = [less(10.0, 4.0), less(4.0, 10.0), less(10.0, 10.0), less(0, 0)]
    assert changes == ["2.50x less", "2.50x more", "the same", "the same"]
    assert [faster(100.0, 150.0), faster(100.0, 1549.0)] == ["1.50x", "15.5x"]
    rates = [format_rate(value) for value in (2.0, 1.5e3, 163.25e9, 2.0e12)]
    assert rates == ["2.0 FLOP/s", "1.5 kFLOP/s", "163.2 GFLOP/s", "2.0 TFLOP/s"]
    assert shape_text((128, 100, 512)) == "128 x 100 x 512"


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_longer_than_the_console(width: int) -> None:
    one, several = make_profile("as in the recipe", 1), [make_profile("reference", 4), make_profile("all", 1)]
    console = Console(width=width)
    for report in (make_report(one), make_report(*several)):
        with console.capture() as capture:
            print_report(report, console)
        assert max(map(len, capture.get().splitlines())) <= width


def test_data_is_json_and_adds_up() -> None:
    report = make_report(make_profile("reference", 4, rows=2), make_profile("all", 1, timed=False))
    data = json.loads(json.dumps(report_data(report)))
    first, second = data["profiles"]
    assert data["shape"] == {"rows": 4, "source": 30, "target": 20}
    assert data["vocabulary"] == {"source": 1234, "target": 56}
    ledger = first["ledger"]
    assert sum(entry["bytes"] for entry in ledger["entries"]) == ledger["peak_bytes"] == 35_012_345
    assert sum(ledger["stash"].values()) == ledger["stash_bytes"] == 36_000_000
    assert max(size for _, size, _ in ledger["timeline"]) == ledger["peak_bytes"]
    assert ledger["peak_phase"] == "backward"
    assert [(entry["shape"], entry["count"]) for entry in ledger["largest"]] == [([4, 30, 128], 4), ([], 1)]
    assert first["bytes"] == "estimated"
    ops = dict.fromkeys(("encoder", "decoder", "attention", "output"), "reference")
    assert first["ops"] == {**ops, "stash": "auto"}
    assert first["times"]["shape"] == {"rows": 2, "source": 30, "target": 20}
    assert first["times"]["milliseconds"]["forward"] == {"attention": 3.0, "decoder": 1.0}
    assert first["times"]["target_tokens_per_second"] == pytest.approx(2000.0)
    assert first["times"]["share_of_peak"] == pytest.approx(3.0e6 / 0.04 / 4.0e9)
    assert second["times"] is None


def test_a_thinned_timeline_keeps_the_peak_and_the_phases() -> None:
    moments = [Moment(0.01 * index, index * 7919 % 10007, "forward") for index in range(5000)]
    moments += [Moment(50.0 + 0.01 * index, index * 31 % 977, "backward") for index in range(5000)]
    moments += [Moment(100.0, size, "optimizer") for size in (5, 20_000, 3)]
    few = downsample(moments, 100)
    assert len(few) < 110
    assert [moment for moment in few if moment in moments] == few
    assert [moment.milliseconds for moment in few] == sorted(moment.milliseconds for moment in few)
    assert max(few, key=lambda moment: moment.bytes) == Moment(100.0, 20_000, "optimizer")
    first = {
        phase: next(m for m in few if m.phase == phase) for phase in ("forward", "backward", "optimizer")
    }
    assert list(first.values()) == [moments[0], moments[5000], moments[10_000]]
    assert few[-1] == moments[-1]
    # The highest of each column is there: the outline is the same.
    for begin in range(0, 5000, 200):
        assert max(moments[begin : begin + 200], key=lambda moment: moment.bytes) in few
    assert downsample(moments[:3]) == moments[:3]


def test_the_first_of_equal_peaks_counts() -> None:
    ledger = Ledger(
        timeline=[Moment(0.0, 5, "forward"), Moment(1.0, 9, "forward"), Moment(2.0, 9, "backward")]
    )
    assert peak_moment(ledger) == Moment(1.0, 9, "forward")
    assert str(SHAPE) == "4 x 30 x 20"


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


def test_long_texts_are_wrapped_inside_their_column_and_the_console() -> None:
    table = Table("step", "what it is", "seconds", title="steps")
    table.add_row("first", "word " * 20, "3")
    lines = printed(table, 80)
    assert lines[0] == "steps"
    assert [line.split() for line in lines[-2:]] == [["first", *["word"] * 13, "3"], ["word"] * 7]
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
