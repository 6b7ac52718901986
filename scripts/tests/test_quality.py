from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.compare import quality
from scripts.bench.compare.quality import Checkpoint
from tests.unit.cli.conftest import Call

ROWS = [
    {
        "name": "one",
        "version": "1.0",
        "parameters": 19_500_000,
        "start_seconds": 12.4,
        "device_bytes": 3_000_000_000,
        "checkpoints": [
            {"mark": 60.0, **Checkpoint(60.2, 400, 10**9, 40_000.0, 3.14)._asdict()},
            {"mark": 510.0, **Checkpoint(510.1, 3400, 2 * 10**9, 40_123.4, 30.06, 50.1)._asdict()},
        ],
        "curve": [],
        "test": {"bleu": 55.0},
    },
    {
        "name": "two",
        "version": "2",
        "parameters": 19_229_824,
        "start_seconds": 20.0,
        "device_bytes": 1_500_000_000,
        "checkpoints": [{"mark": 60.0, **Checkpoint(55.0, 7000, 5 * 10**8, 850_000.0, 35.5)._asdict()}],
        "curve": [[30.0, 20.0], [55.0, 35.5]],
        "test": {},
    },
]


def test_econmt_s_checkpoints_are_the_last_before_each_mark(tmp_path: Path) -> None:
    rows = "1000 40.5 10.5 500 90", "2000 69.75 20.5 600 91", "3000 99.5 30.5 600 92"
    names = "update seconds bleu peak_memory_bytes target_tokens_per_second"
    (tmp_path / "metrics.tsv").write_text("".join("\t".join(row.split()) + "\n" for row in (names, *rows)))
    log = ["first update begins: 9.50 s"]
    econmt = quality.PROGRAMS["econmt"]()
    curve = econmt.curve(log, tmp_path)
    wanted = Checkpoint(60.25, 2000, 600, 91.0, 20.5)
    assert quality.last_before(curve, [20.0, 60.0, 88.0]) == {60.0: wanted, 88.0: wanted}
    assert [(each.seconds, each.bleu) for each in curve] == [(31.0, 10.5), (60.25, 20.5), (90.0, 30.5)]
    assert "training.max_seconds=570" in econmt.command(tmp_path, [], [540.0])
    base = quality.PROGRAMS["transformer-base"]()
    assert base.command(tmp_path, [], [60.0, 540.0])[-5:] == ["--size", "base", "--marks", "60.0", "540.0"]


def test_scores_are_of_what_was_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hypotheses.test").write_text("the law of the land\n")
    found = quality.scores(tmp_path / "hypotheses.test", ["the law of the land"])
    assert found == {"bleu": 100.0, "chrf": 100.0}
    assert quality.scores(tmp_path / "hypotheses.00001", [""]) == {}
    row = quality.rows_of(ROWS[0])
    assert list(row.values())[1:] == ["19.5", "3.1", "30.1", 50.1, 40_123, 55.0, "3,000", "2,000", "12"]
    assert list(row)[2:4] == ["BLEU at 1 min", "BLEU at 8.5 min"]
    quality.draw(ROWS, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()[:500]
    drawn: list[Any] = []
    monkeypatch.setattr(quality, "draw_lines", lambda lines, *_, **__: drawn.append(lines))
    quality.draw(ROWS[1:], tmp_path / "plot.svg")
    assert drawn == [{"two": {0.5: 20.0, 55 / 60: 35.5}}], "over minutes"


def test_what_was_measured_is_kept(bench: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "quality.json"
    output.write_text(json.dumps({"transformer": ROWS[0]}))

    def measure(program: quality.Recurrent, *_: Any) -> dict[str, Any]:
        if program.name != "econmt":
            raise quality.FailedError("no memory")
        return ROWS[1]

    monkeypatch.setattr(quality, "measure", measure)
    words = ("--store", tmp_path, "--work", tmp_path, "--device", "cpu", "--output", output)
    kept = signal.getsignal(signal.SIGTERM)
    try:
        ended = bench("compare.quality", *words, "--only", "econmt", "transformer")
        assert bench("compare.quality", *words, "--only", "transformer-base", "econmt").code == 1
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert ended.code == 0
    assert list(json.loads(output.read_text())) == ["transformer", "econmt"]
    assert "two 2" in ended.out
    picture = tmp_path / "plot.svg"
    assert bench("compare.quality", "--show", output, "--plot", picture).code == 0
    assert picture.is_file()
    assert bench("compare.quality").code == 2
