from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.text import Text

from econmt.bench import training
from econmt_ops.dispatch import session
from tests.unit.cli.conftest import Call

SMALL = ("model.embedding=6", "model.encoder.size=8", "model.decoder.size=8", "model.attention.size=5")
SET = [word for change in SMALL for word in ("--set", change)]


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    session.forget()
    yield
    session.forget()


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_a_table_on_a_terminal(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("econmt.cli.bench.sys.stdout.isatty", lambda: True)
    ended = call("bench training quickstart --length 4 --seconds 0.01", *SET).succeeded()
    assert max(Text.from_ansi(line).cell_len for line in ended.lines) <= 80
    assert "training steps" in " ".join(ended.out.split())
    assert "processor" not in ended.out


def test_an_interruption_shows_the_rows(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [{"bench": "training", "recipe": name, "milliseconds": 1.5} for name in ("one", "two")]

    def row_of(*_: object) -> dict[str, str | float]:
        if not left:
            raise KeyboardInterrupt
        return left.pop(0)

    monkeypatch.setattr(training, "row_of", row_of)
    file, picture = tmp_path / "training.csv", tmp_path / "training.png"
    words = "bench training quickstart --length 4 --length 5 --length 6"
    ended = call(words, "--csv", file, "--plot", picture)
    assert ended.code == 130
    assert [row["recipe"] for row in rows_of(file)] == ["one", "two"]
    assert "two" in ended.out
    assert "interrupted; the results so far follow" in ended.err
    assert not picture.exists()
    ended = call(words)
    assert (ended.code, ended.out, ended.err) == (130, "", "")


def test_select(call: Call, tmp_path: Path) -> None:
    words = "bench select quickstart --bucket 4x4 --seconds 3600"
    ended = call(words, *SMALL, "--csv", tmp_path / "select.csv").succeeded()
    assert "a run uses: encoder re" in ended.err
    assert "recompute/gates" in ended.out
    assert {row["bench"] for row in csv.DictReader(ended.lines)} == {"select"}
    assert ended.out == (tmp_path / "select.csv").read_text(), "with the machine and the date"
    assert len(rows_of(tmp_path / "select.csv")) >= 6
    assert list((tmp_path / "cache").glob("choices.json"))


def test_training(call: Call, tmp_path: Path) -> None:
    ended = call("bench training quickstart --length 4 --seconds 0", *SET, "--csv", tmp_path / "t.csv")
    assert ended.code == 0, ended.err
    (row,) = rows_of(tmp_path / "t.csv")
    assert ended.out == (tmp_path / "t.csv").read_text()
    assert float(row["target tokens/s"]) > 0
    assert row["ops"] == "encoder=auto, decoder=auto, attention=auto, output=auto, stash=auto"
