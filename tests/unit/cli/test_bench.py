from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from econmt.bench import layouts, selection
from econmt.bench.selection import GridEntry
from econmt_ops.dispatch import session
from tests.unit.cli.conftest import Call

SMALL = ("model.embedding=6", "model.encoder.size=8", "model.decoder.size=8", "model.attention.size=5")


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    session.forget()
    yield
    session.forget()


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_layout(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "SHAPES", [(2, 3, 4)])
    monkeypatch.setattr(layouts, "RECURRENT", [(2, 3)])
    file, picture = tmp_path / "layout.csv", tmp_path / "layout.png"
    options = ("--seconds", "0.01", "--threads", "1", "--csv", file)
    ended = call("bench", "layout", "--dtype", "float32", *options, "--plot", picture)
    assert ended.code == 0, ended.err
    assert ended.out == file.read_text()
    assert "by columns: W X^T" in ended.out
    assert picture.stat().st_size > 0
    first = rows_of(file)
    assert {row["dtype"] for row in first} == {"float32"}
    assert {row["threads"] for row in first} == {"1"}
    assert call("bench", "layout", "--recurrent", "--dtype", "bfloat16", *options).code == 0
    later = rows_of(file)
    assert [row["milliseconds"] for row in later[: len(first)]] == [row["milliseconds"] for row in first]
    assert {row["steps"] for row in later[len(first) :]} == {str(layouts.STEPS)}


@pytest.mark.parametrize("name", ["layout", "training"])
def test_a_table_on_a_terminal(call: Call, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(layouts, "SHAPES", [(2, 3, 4)])
    monkeypatch.setattr("econmt.cli.measuring.sys.stdout.isatty", lambda: True)
    words = [word for change in SMALL for word in ("--set", change)]
    more = ("--dtype", "float32") if name == "layout" else ("quickstart", "--length", "4", *words)
    ended = call("bench", name, *more, "--seconds", "0.01", "--threads", "1")
    assert ended.code == 0, ended.err
    assert max(map(len, ended.lines)) <= 80
    expected = "layouts: X (rows, inputs), W (outputs, inputs)" if name == "layout" else "training steps"
    assert expected in " ".join(ended.out.split())
    assert "processor" not in ended.out


def test_what_was_measured_before_an_interruption_is_told(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [{"bench": "layout", "library": name, "milliseconds": 1.5} for name in ("one", "two")]

    def products(*_: object, **__: object) -> Iterator[dict[str, str | float]]:
        yield from left
        raise KeyboardInterrupt

    monkeypatch.setattr(layouts.LayoutTimer, "products", products)
    file, picture = tmp_path / "layout.csv", tmp_path / "layout.png"
    ended = call("bench", "layout", "--csv", file, "--plot", picture)
    assert ended.code == 130
    assert [row["library"] for row in rows_of(file)] == ["one", "two"]
    assert "two" in ended.out
    assert "interrupted; the results so far follow" in ended.err
    assert not picture.exists()
    left.clear()
    ended = call("bench", "layout")
    assert (ended.code, ended.out, ended.err) == (130, "", "")


def test_every_bench_takes_the_same_options(call: Call) -> None:
    for name in ("layout", "select", "training"):
        out = " ".join(call("bench", name, "--help").out.split())
        assert "--device <str> Device: auto, cpu, cuda or cuda:N. [default: auto]" in out
        assert "Number of CPU threads. [default: (as many as there are cores); 1<=x<=1024]" in out
        assert "CSV file to append the rows to, with machine, versions and date." in out
        assert "Picture to draw the rows in." in out
        assert "--place" not in out


def test_select(call: Call, tmp_path: Path) -> None:
    ended = call("bench", "select", "quickstart", *SMALL, "--bucket", "4x4", "--csv", tmp_path / "select.csv")
    assert ended.code == 0, ended.err
    assert "a run uses: encoder re" in ended.err
    assert "recompute/gates" in ended.out
    assert {row["bench"] for row in csv.DictReader(ended.lines)} == {"select"}
    assert len(rows_of(tmp_path / "select.csv")) >= 6
    assert list((tmp_path / "cache").glob("choices.json"))


def test_the_grid_goes_on_where_it_stopped(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "grid", lambda: [GridEntry("linear", 1, 2, 8, "float32")])
    file = tmp_path / "grid.csv"
    ended = call("bench", "select", "--grid", "--csv", file)
    assert ended.code == 0, ended.err
    assert ended.out == file.read_text()
    assert len(rows_of(file)) == 1
    monkeypatch.setattr(
        selection,
        "grid",
        lambda: [GridEntry("linear", 1, 2, 8, "float32"), GridEntry("linear", 2, 2, 8, "float32")],
    )
    ended = call("bench", "select", "--grid", "--csv", file, "--limit", "0")
    assert "1 shapes are left; the same command resumes" in ended.err
    assert ended.out == ""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    ended = call("bench", "select", "--grid", "--csv", file)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in ended.lines]
    assert "linear" in " ".join(lines)
    assert max(map(len, lines)) <= 80
    assert [row["batch"] for row in rows_of(file)] == ["1", "2"]


def test_the_grid_in_parts_and_summed_up(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [GridEntry("linear", batch, 2, 8, "float32") for batch in (1, 2, 3)]
    monkeypatch.setattr(selection, "grid", lambda: entries)
    files = [tmp_path / "1.csv", tmp_path / "2.csv"]
    for number, file in enumerate(files, 1):
        ended = call("bench", "select", "--grid", "--part", f"{number}/2", "--csv", file, "--threads", "1")
        assert ended.code == 0, ended.err
    assert [[row["batch"] for row in rows_of(file)] for file in files] == [["1", "3"], ["2"]]
    ended = call("bench", "select", "--summary", *files, "--csv", tmp_path / "all.csv")
    assert ended.code == 0, ended.err
    (row,) = csv.DictReader(ended.lines)
    assert (row["op"], row["shapes"]) == ("linear", "3")
    assert row["machine"].endswith(", 1 threads")
    assert [row["batch"] for row in rows_of(tmp_path / "all.csv")] == ["1", "2", "3"]


def test_training(call: Call, tmp_path: Path) -> None:
    changes = [word for change in SMALL for word in ("--set", change)]
    ended = call(
        "bench",
        "training",
        "quickstart",
        *changes,
        "--length",
        "4",
        "--seconds",
        "0",
        "--csv",
        tmp_path / "t.csv",
    )
    assert ended.code == 0, ended.err
    (row,) = rows_of(tmp_path / "t.csv")
    assert ended.out == (tmp_path / "t.csv").read_text()
    assert float(row["target tokens/s"]) > 0
    assert row["ops"] == "encoder=auto, decoder=auto, attention=auto, output=auto, stash=auto"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("layout", "--dtype", "float8"), "'float8' is not one of 'float32', 'bfloat16'"),
        (("layout", "--csv", "nowhere/x.csv"), "nowhere: no such folder"),
        (("layout", "--plot", "."), ".: a folder; give the name of a file"),
        (
            ("layout", "--device", "cpu", "--graph"),
            "--graph needs a GPU; give --device cuda, or leave it out",
        ),
        (("select",), "give a recipe, --grid, or --summary and CSV files"),
        (("select", "quickstart", "--grid"), "give a recipe, --grid, or --summary and CSV files"),
        (("select", "--summary"), "give a recipe, --grid, or --summary and CSV files"),
        (("select", "--summary", "no.csv"), "no.csv: no such file"),
        (("select", "--grid", "--part", "3/2"), "--part '3/2': give i/n with i from 1 to n"),
        (("select", "quickstart", "--byte-limit", "many"), "--byte-limit:"),
        (("training", "nosuch"), "nosuch: no such recipe"),
    ],
)
def test_what_cannot_be_used(call: Call, words: tuple[str, ...], message: str) -> None:
    ended = call("bench", *words)
    assert ended.code == 2
    assert message in ended.err
    assert ended.out == ""


def test_a_foreign_csv_is_refused_before_anything_is_measured(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    ended = call("bench", "layout", "--csv", tmp_path / "mine.csv")
    assert ended.code == 2
    assert "mine.csv: not a table of econmt bench" in ended.err


def test_help_gives_examples(call: Call) -> None:
    for words in ((), ("layout",), ("select",), ("training",)):
        ended = call("bench", *words, "--help")
        assert ended.code == 0
        assert "econmt bench" in ended.out


@pytest.mark.parametrize("name", ["lstm", "scan", "memory-task", "language-model", "parallel"])
def test_benchmarks_of_the_project_are_named_with_their_command(name: str, call: Call) -> None:
    ended = call("bench", name, "--device", "cuda", "--made-up")
    assert ended.code == 2
    assert f"in a checkout of econmt run python -m scripts.bench {name}\n" in ended.err
