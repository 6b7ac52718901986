"""Processes that work together, and what is told of them."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from econmt.config.recipe import Recipe, load_recipe, read_recipe
from econmt.errors import EconmtError
from scripts.bench import parallel
from scripts.bench.parallel import Setting, Way, _counting, ways
from scripts.bench.parallel_processes import together
from tests.unit.cli.conftest import Call

RECIPE = """
name: tiny
output: tiny
data: {source: en, target: de, train: [train], valid: valid, subwords: {type: bpe, size: 60}}
model: {embedding: 8, encoder: {layers: 2, size: 8}, decoder: {layers: 2, size: 8}, attention: {size: 8}}
training: {batch: {size: 8}, max_updates: 1}
"""


def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return read_recipe(path)


def setting(of: Recipe, *, grown: bool = False) -> Setting:
    return Setting(of, 8, 12, grown, "cpu", 1, "float32", 0.05, 120.0)


def test_ways_of_several_processes() -> None:
    alone = Way(1, "data")
    assert ways([1], ["data", "pipeline"]) == [alone]
    found = ways([1, 2, 4], ["data", "pipeline"])
    assert [way.division for way in found] == ["alone", "2 data", "2 stages", "4 data", "4 stages"]
    assert [way.stages for way in found] == [1, 1, 2, 1, 4]


def tell_place(job: dict[str, int]) -> dict[str, Any]:
    return {"rank": os.environ["RANK"], "threads": torch.get_num_threads(), "twice": job["number"] * 2}


def fail(_: object) -> object:
    if os.environ["RANK"] == "1":
        raise RuntimeError("no more\nof this")
    time.sleep(60)
    return {}


def leave(_: object) -> object:
    if os.environ["RANK"] == "0":
        os._exit(3)
    raise EconmtError("rank 0 is gone")


def hang(_: object) -> object:
    time.sleep(60)
    return {}


@pytest.mark.thorough
def test_processes_give_results_or_one_line() -> None:
    found = together(tell_place, {"number": 4}, 2, 1, 60.0)
    assert found == [{"rank": "0", "threads": 1, "twice": 8}, {"rank": "1", "threads": 1, "twice": 8}]
    with pytest.raises(EconmtError, match=r"^rank 1: no more$"):
        together(fail, {}, 2, 1, 60.0)
    with pytest.raises(EconmtError, match=r"^rank 1: rank 0 is gone$"):
        together(leave, {}, 2, 1, 60.0)
    with pytest.raises(EconmtError, match=r"^not ready within 1 s$"):
        together(hang, {}, 1, 1, 1.0)


def test_bytes_are_counted_as_a_ring_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4 if group is None else group)
    called: list[str] = []
    for name in ("all_reduce", "all_gather", "broadcast", "reduce", "isend"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: called.append(name))
    tensor = torch.zeros(100)
    with _counting() as sent:
        dist.all_reduce(tensor)
        dist.all_gather([tensor] * 4, tensor)
        dist.all_reduce(tensor, group=2)
        dist.isend(tensor, 1)
    dist.all_reduce(tensor)
    assert sent == [600.0, 1200.0, 400.0, 400.0]
    assert called == ["all_reduce", "all_gather", "all_reduce", "isend", "all_reduce"]


@pytest.mark.thorough
def test_two_processes_are_measured(tmp_path: Path) -> None:
    there = setting(recipe(tmp_path))
    alone, both = parallel.rows(there, ways([2], ["data"]), lambda _: None)
    assert (alone["scaling"], alone["MB sent"]) == (1.0, 0.0)
    for key in ("tokens/s", "scaling", "MB sent"):
        assert float(both[key]) > 0


TEXT = """
name: tiny-text
task: language_model
output: tiny
data: {text: txt, train: [train], valid: valid, subwords: {type: words, size: 50}}
model: {embedding: 8, layers: 2, size: 8}
training: {batch: {size: 8}, bptt: 12, max_updates: 1}
"""


def test_what_no_pipeline_can_train_is_told() -> None:
    there = setting(load_recipe("iwslt", ["model.decoder.cell=gru", "model.decoder.input_feeding=false"]))
    (failed,) = parallel.rows(there, [Way(2, "pipeline")], lambda _: None)
    assert "parallel.pipeline: 2 cannot be combined with" in str(failed["failure"])


@pytest.mark.thorough
def test_a_pipeline_of_two_processes(tmp_path: Path) -> None:
    (tmp_path / "text.yaml").write_text(TEXT)
    there = setting(read_recipe(tmp_path / "text.yaml"))
    found = list(parallel.rows(there, ways([2], ["pipeline"]), lambda _: None))
    assert [row["division"] for row in found] == ["alone", "2 stages"]
    assert "failure" not in found[1]
    assert float(found[1]["MB sent"]) > 0


@pytest.mark.thorough
def test_a_way_that_fails_has_a_line_and_the_others_figures(tmp_path: Path) -> None:
    there = setting(recipe(tmp_path))._replace(limit=0.2)
    rows = list(parallel.rows(there, ways([1], []), lambda _: None))
    assert [row.get("failure") for row in rows] == ["not ready within 0 s"]


@pytest.mark.parametrize(
    ("option", "value"), [("--processes", "0"), ("--processes", "two"), ("--division", "data,rows")]
)
def test_bad_options_are_refused(bench: Call, option: str, value: str) -> None:
    ended = bench("parallel", "ptb", option, value)
    assert ended.code == 2
    assert f"{option}: invalid" in ended.err
    assert f"'{value}'" in ended.err


@pytest.mark.thorough
def test_two_processes_are_timed(bench: Call, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    options = ("--division", "data", "--length", "6", "--seconds", "0.05", "--device", "cpu")
    ended = bench("parallel", tmp_path / "tiny.yaml", *options, "--csv", tmp_path / "p.csv")
    assert ended.code == 0, ended.err
    assert max(map(len, ended.lines)) <= 80
    with (tmp_path / "p.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["division"] for row in rows] == ["alone", "2 data"]
