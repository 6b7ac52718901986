"""``python -m scripts.bench``: the project's own benchmarks, at tiny sizes."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest

from scripts import kill_campaign
from scripts.bench import frame, language_model
from scripts.bench.__main__ import commands
from scripts.bench.frame import Bench, ratio_of
from scripts.tests.conftest import Measured
from tests.conftest import run_python
from tests.unit.cli.conftest import Call

OPTIONAL = "triton matplotlib sacremoses ctranslate2 liger_kernel cut_cross_entropy accelerated_scan uvicorn starlette"
ALL_HELP = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL.split()!r}))  # as if they were not installed
from scripts.bench.__main__ import commands, main
for name in commands():
    print(f"## {{name}}", flush=True)
    try:
        main([name, "--help"])
    except SystemExit as end:
        assert not end.code, name
"""


@pytest.mark.slow
def test_every_benchmark_has_a_help_text_without_a_gpu_and_optional_packages() -> None:
    done = run_python("-c", ALL_HELP, env={"CUDA_VISIBLE_DEVICES": ""}, check=False)
    assert done.returncode == 0, done.stderr
    said = dict(part.split("\n", 1) for part in done.stdout.split("## ")[1:])
    assert said.keys() == commands().keys()
    for name, text in said.items():
        assert f"python -m scripts.bench {name} " in text.replace("\n", " \n"), name


@pytest.mark.parametrize(("name", "line"), commands().items())
def test_every_benchmark_is_listed_with_a_whole_sentence(name: str, line: str) -> None:
    assert re.fullmatch(r"(Times|Measures|Writes|Compares) .*\.", line)
    assert len(line) <= 57


def test_the_frame_of_a_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All parts by default; failures once, below the table; seconds are doubled until they suffice."""
    bench = Bench(f"{frame.PROGRAM} made-up", parts="ab")
    assert [bench.begin(words).parts for words in ([], ["b"])] == [["a", "b"], ["b"]]
    frame.print_rows([{"case": "x", "failure": "FAILED here"}, {"case": "y", "failure": ["no", "text"]}], "t")
    assert capsys.readouterr().out.splitlines()[-2:] == ["x, FAILED here", "y, ['no', 'text']"]
    asked: list[float] = []

    def alternate(calls: object, seconds: float, **_: object) -> dict[str, str] | None:
        asked.append(seconds)
        return {"0": "timed"} if len(asked) == 3 else None

    monkeypatch.setattr(frame, "alternate", alternate)
    assert frame.in_turns({"mine": list}, frame.CPU, seconds=3.0) == {"mine": "timed"}
    assert asked == [3.0, 6.0, 12.0]


def test_kills_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    kill = {"kind": "run", "victim": "rank", "moment": "save", "same": True, "ended": 2.0, "lines": 1}
    of_launcher = {**kill, "victim": "launcher", "lines": 0, "ended": math.nan}
    assert kill_campaign.show([of_launcher, kill])
    assert "nothing was lost" in (told := capsys.readouterr().out)
    assert "1 of 1" in told
    assert "nan" not in told
    for broken in ({"same": False}, {"ended": math.inf}, {"lines": 0}, {"lines": 2}):
        assert not kill_campaign.show([of_launcher, {**kill, **broken}])


def test_an_unknown_benchmark(bench: Call) -> None:
    ended = bench("made-up")
    assert ended.code == 2
    assert "no benchmark made-up" in ended.err
    assert "  gpu.step " in bench().out


def test_ratios_of_pairs() -> None:
    ratio = ratio_of([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    assert ratio == (3.0, 2.0, 4.0)
    assert str(ratio) == "3.00 (2.00 to 4.00)"
    # Of ten coins fewer than two show heads once in 93 throws: the second and the ninth of ten bound the median.
    assert ratio_of(range(1, 11), [1.0] * 10) == (5.5, 2.0, 9.0)


def test_scan(bench: Call, tmp_path: Path) -> None:
    file = tmp_path / "scan.csv"
    options = ("--seconds", "0.01", "--threads", "1", "--csv", file)
    ended = bench("scan", "--shape", "2x20x3", "--shape", "1x1x1", "--dtype", "bfloat16", *options)
    assert ended.code == 0, ended.err
    assert max(map(len, ended.lines)) <= 80
    assert "share" in ended.out
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    found = {(row["batch"], row["steps"], row["pass"], row["implementation"]) for row in rows}
    assert {("2", "20", "backward", "chunk"), ("1", "1", "forward", "reference")} <= found
    assert {row["bench"] for row in rows} == {"scan"}


@pytest.mark.parametrize("shape", ["2x3", "2x3xa", "1x2x3x4"])
def test_scan_of_no_shape(shape: str, bench: Call) -> None:
    ended = bench("scan", "--shape", shape)
    assert ended.code == 2
    assert f"'{shape}'" in ended.err


def test_memory_task(measured: Measured) -> None:
    small = ("--hidden", "4", "--symbols", "2", "--updates", "20", "--threads", "1")
    rows = measured("memory-task", "--steps", "4,8", *small)
    assert [(row["steps"], row["cell"]) for row in rows] == [
        (steps, cell) for steps in (4, 8) for cell in ("lstm", "gilr", "gilr_lstm")
    ]
    assert all(("speed-up" in row) == (row["cell"] != "lstm") for row in rows)


@pytest.mark.parametrize(
    ("option", "value"), [("--cell", "lstm,made-up"), ("--steps", "0"), ("--steps", "a")]
)
def test_memory_task_of_no_such_thing(option: str, value: str, bench: Call) -> None:
    ended = bench("memory-task", option, value)
    assert ended.code == 2
    assert option in ended.err


def test_language_model(
    bench: Call, measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(language_model, "has_compiler", lambda: False)
    picture = tmp_path / "lm.png"
    sizes = ("--hidden", "8", "--batch", "2", "--vocabulary", "30")
    rows = measured("language-model", *sizes, "--seconds", "0.05", "--plot", picture)
    names = [row["contender"] for row in rows]
    assert names[:2] == [language_model.DEFAULT, language_model.BY_TORCH]
    assert "econmt recompute" in names
    assert rows[-1]["contender"] == language_model.AUTO
    assert rows[-1]["ops"].startswith("lstm ")
    assert picture.stat().st_size > 0
