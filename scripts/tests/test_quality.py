from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from econmt.config.recipe import parse_recipe
from econmt.data.batching.store import prepare
from scripts.bench.compare import quality
from scripts.bench.compare.launchers import marks
from scripts.bench.compare.make_data import pieces_of
from scripts.bench.compare.toolkit import Places
from scripts.bench.compare.tools.by_minute import BY_MINUTE, Checkpoint
from tests.unit.cli.conftest import Call

ROWS = [
    {
        "name": "one",
        "version": "1.0",
        "precision": "tf32",
        "parameters": 19_500_000,
        "tokens_per_second": 40_123,
        "tokens_per_update": 5_660,
        "start_seconds": 12.4,
        "device_bytes": 3_000_000_000,
        "checkpoints": [
            {"mark": 60.0, "seconds": 60.2, "update": 400, "allocated_bytes": 10**9, "bleu": 3.14},
            {"mark": 510.0, "seconds": 510.1, "update": 3400, "allocated_bytes": 2 * 10**9, "bleu": 30.06},
        ],
        "curve": [],
    },
    {
        "name": "two",
        "version": "2",
        "precision": "bfloat16",
        "parameters": 19_229_824,
        "tokens_per_second": 850_000,
        "tokens_per_update": 5_724,
        "start_seconds": 20.0,
        "device_bytes": 1_500_000_000,
        "checkpoints": [
            {"mark": 60.0, "seconds": 55.0, "update": 7000, "allocated_bytes": 5 * 10**8, "bleu": 35.5}
        ],
        "curve": [[30.0, 20.0], [55.0, 35.5]],
    },
]


def test_the_clock_saves_at_each_mark_and_stands_still_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(marks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setenv("COMPARE_MARKS", "60.0,120")
    monkeypatch.setenv("COMPARE_MARKS_FOLDER", str(tmp_path))
    clock = marks.Marks.from_environment()
    assert clock is not None
    saved = []

    def save(folder: Path) -> None:
        assert folder.is_dir()
        saved.append((folder.name, now[0]))
        now[0] += 1000.0

    clock.begin()
    now[0] = 150.0
    clock.begin()  # of the second update: the clock goes on
    assert not clock.updated(2, save)
    now[0] = 161.0
    assert not clock.updated(3, save)
    assert saved == [("mark-60", 161.0)]
    now[0] = 1219.0  # 119 s of training, 1,000 s of saving
    assert not clock.updated(5, save)
    now[0] = 1220.0
    assert clock.updated(6, save)
    assert saved[1:] == [("mark-120", 1220.0)]
    said = capsys.readouterr().out.splitlines()
    read = BY_MINUTE["fairseq-lstm"]().checkpoints(said, tmp_path, [60.0, 120.0])
    assert [checkpoint[:3] for checkpoint in read] == [(60.0, 61.0, 3), (120.0, 120.0, 6)]


def test_without_marks_a_launcher_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPARE_MARKS", raising=False)
    assert marks.Marks.from_environment() is None


def test_econmt_s_checkpoints_are_the_last_before_each_mark(tmp_path: Path) -> None:
    (tmp_path / "metrics.tsv").write_text(
        "update\tseconds\tbleu\tpeak_memory_bytes\n1000\t40.5\t10.5\t500\n2000\t69.5\t20.5\t600\n3000\t99.5\t30.5\t600\n"
    )
    econmt = BY_MINUTE["econmt"]()
    log = ["econmt: 19,229,824 parameters, 461,604 pairs", "first update begins: 9.50 s"]
    assert econmt.checkpoints(log, tmp_path, [20.0, 60.0, 89.0]) == [
        Checkpoint(60.0, 60.0, 2000, 600, 20.5),
        Checkpoint(89.0, 60.0, 2000, 600, 20.5),
    ]
    assert econmt.curve(log, tmp_path) == [(31.0, 10.5), (60.0, 20.5), (90.0, 30.5)]
    assert econmt.parameters(log) == 19_229_824


def test_numbers_of_parameters_are_read() -> None:
    log = ["x | INFO | fairseq_cli.train | num. shared model params: 25,075,200 (num. trained: 25,075,200)"]
    assert BY_MINUTE["fairseq-lstm"]().parameters(log) == 25_075_200
    # the encoder layers' attention (four products with biases) and inner layer, which the log counts twice
    twice = 4 * (4 * 384 * 385 + 384 * 1024 + 1024 + 1024 * 384 + 384)
    assert BY_MINUTE["fairseq-transformer"]().parameters(log) == 25_075_200 - twice
    assert BY_MINUTE["opennmt"]().parameters(["[..] * number of parameters: 19246208"]) == 19_246_208
    assert BY_MINUTE["opennmt"]().parameters([]) is None


def test_all_batches_have_as_many_tokens(tmp_path: Path) -> None:
    places = Places(tmp_path / "data", tmp_path, Path("python"), "en", "fr")
    for tool in BY_MINUTE.values():
        toolkit = tool()
        toolkit.device = "cuda"
        command = toolkit.train_until(places, tmp_path / "model", [60.0, 540.0])
        said = " ".join([*command.words, *(path.read_text() for path in tmp_path.glob("*.yaml"))])
        if not toolkit.reads_store:
            assert "--max-tokens 6000" in said or "batch_size: 6000" in said
        assert ("--fp16" in said) == (toolkit.precision == "float16")
        assert ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in toolkit.variables()) == (toolkit.precision == "tf32")
    assert "training.max_seconds=570" in BY_MINUTE["econmt"]().train_until(places, tmp_path, [540.0]).words
    words = BY_MINUTE["transformer-base"]().train_until(places, tmp_path, [60.0, 540.0]).words
    assert words[-5:] == ["--size", "base", "--marks", "60.0", "540.0"]


def test_the_table_has_a_column_for_each_mark(tmp_path: Path) -> None:
    row = quality.rows_of(ROWS[0])
    figures = ["one 1.0", "tf32", "19.5", 40_123, 5_660, "3.1", "30.1", "3,000", "2,000", "12"]
    assert list(row.values()) == figures
    assert list(row)[5:7] == ["BLEU at 1 min", "BLEU at 8.5 min"]
    quality.draw(ROWS, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()[:500]


def test_token_files_of_a_joint_store_have_one_vocabulary(tmp_path: Path) -> None:
    lines = [
        f"the {word} of\u00a0{word}s {number}" for number, word in enumerate(["act", "law", "rule"] * 40)
    ]
    for split, count in (("train", 120), ("valid", 7)):
        for side in "en", "fr":
            text = "".join(f"{line} {side}\n" for line in lines[:count])
            (tmp_path / f"{split}.{side}").write_text(text, encoding="utf-8")
    recipe = parse_recipe(
        "name: a\noutput: a\ntraining: {max_updates: 1}\ndata:\n  source: en\n  target: fr\n  train: [train]\n"
        "  valid: valid\n  subwords: {type: bpe, size: 60, joint: true}\n",
        "test",
    )
    prepare(recipe, tmp_path / "store", [tmp_path], show_progress=False)
    prepared = quality.make_data(tmp_path / "data", tmp_path / "store", token_files=True)
    data = tmp_path / "data"
    assert (data / "vocabulary.en.fairseq.txt").read_text() == (
        data / "vocabulary.fr.fairseq.txt"
    ).read_text()
    counts = dict(
        line.rsplit(" ", 1) for line in (data / "vocabulary.en.fairseq.txt").read_text().splitlines()
    )
    written = [(data / f"train.{side}").read_text(encoding="utf-8") for side in ("en", "fr")]
    assert {piece: int(count) for piece, count in counts.items() if count != "0"} == dict(
        Counter(" ".join(written).split())
    )
    for number, line in enumerate((data / "test.fr").read_text(encoding="utf-8").splitlines()):
        assert prepared.vocabularies.target.joined(pieces_of(line)) == prepared.vocabularies.target.decode(
            prepared.valid.pair(number)[1].tolist()
        )
    assert (data / "test.raw.fr").read_text(encoding="utf-8").split("\n")[:7] == prepared.valid_text.target
    assert json.loads((data / "counts.json").read_text())["train_pairs"] == 120


def test_named_spaces_are_read_again() -> None:
    assert pieces_of("a<U+00A0>b <U+2028>") == ["a\u00a0b", "\u2028"]


def test_what_was_measured_is_kept(bench: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "quality.json"
    output.write_text(json.dumps({"opennmt": ROWS[0]}))
    monkeypatch.setattr(quality, "make_data", lambda *_, **__: None)

    class ToolkitRun:
        def __init__(self, key: str, *_: Any) -> None:
            assert key == "econmt"

        def measure(self) -> dict[str, Any]:
            return ROWS[1]

    monkeypatch.setattr(quality, "ToolkitRun", ToolkitRun)
    words = ("--store", tmp_path, "--work", tmp_path, "--device", "cpu", "--output", output)
    kept = signal.getsignal(signal.SIGTERM)
    try:
        ended = bench("compare.quality", *words, "--only", "econmt", "opennmt")
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert ended.code == 0
    assert list(json.loads(output.read_text())) == ["opennmt", "econmt"]
    assert "two 2" in ended.out
    picture = tmp_path / "plot.svg"
    assert bench("compare.quality", "--show", output, "--plot", picture).code == 0
    assert picture.is_file()
    assert bench("compare.quality").code == 2
