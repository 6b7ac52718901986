"""Processes that work together, what is told of them, and how predictions are checked."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from econmt.bench import parallel_measure
from econmt.bench.parallel_calibration import (
    Calibration,
    Setting,
    calibrate,
    read_calibration,
    write_calibration,
)
from econmt.bench.parallel_hardware import H200, paper_profile
from econmt.bench.parallel_measure import Way, _counting, left_out, predicted, stack_of, verdict, ways
from econmt.bench.parallel_processes import Job, together
from econmt.bench.parallel_profile import _parted
from econmt.bench.rows import Row
from econmt.config.recipe import Recipe, load_recipe, read_recipe
from econmt.errors import EconmtError, InputError
from econmt.model import Implementations
from econmt.parallel.cost_layers import value_at

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


def calibration(**changes: Any) -> Calibration:
    """One recurrent layer of 1 ms a step and row, an output layer of nothing, and links that take nothing."""
    layer = {
        "name": "layer 1",
        "side": "target",
        "node": "decoder",
        "parameters": 100.0,
        "unit": "steps",
        "forward": [[0.0, 0.0], [8.0, 8e-3]],
        "backward": [[0.0, 0.0], [8.0, 8e-3]],
        "call": [0.0, 0.0],
        "whole": False,
        "width": 4,
        "kept": 8.0,
        "gather": [[0.0, 0.0]],
        "once": 0.0,
    }
    output = {**layer, "name": "output", "node": "output", "unit": "positions"}
    output |= {"forward": [[0.0, 0.0]], "backward": [[0.0, 0.0]]}
    whole = {
        "recipe": "tiny",
        "batch": 8,
        "length": 12,
        "device": "cpu",
        "processor": "none",
        "ranks": 2,
        "hosted": 2,
        "layers": [layer, output],
        "update": 0.0,
        "overhead": 0.0,
        "value_bytes": 4,
        "state_bytes": 8,
        "tied": "",
        "reduction": {"latency": 0.0, "bandwidth": 1e30},
        "messages": {"latency": 0.0, "bandwidth": 1e30},
        "crowding": [[1.0, 1.0], [2.0, 1.25]],
    }
    return Calibration.model_validate({**whole, **changes})


def test_what_is_measured_is_kept_and_read_back(tmp_path: Path) -> None:
    found = calibration()
    write_calibration(tmp_path / "p.json", found)
    assert read_calibration(tmp_path / "p.json") == found
    assert found.machine("hdr").between.name == "hdr"
    assert not found.machine(None).overlaps
    assert calibration(device="cuda").machine(None).between.name == "ndr"
    assert (found.sides, found.profile.most_stages()) == (1, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "not valid JSON"), ("[1]", "no JSON object"), ('{"recipe": 3}', "recipe")],
)
def test_files_that_are_no_profile(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(InputError, match=words):
        read_calibration(tmp_path / "p.json")


@pytest.mark.parametrize("named", ["recompute", "reference"])
def test_what_waits_for_the_last_chunk_is_parted_as_on_paper(named: str) -> None:
    paper = paper_profile(load_recipe("wikitext2", []), [100], H200, 4, 1).layers[1]
    alone = SimpleNamespace(
        step=SimpleNamespace(implementations=Implementations.everywhere(named)),
        recipe=load_recipe("wikitext2", []),
    )
    timed = paper._replace(backward=((4.0, 2.0), (8.0, 3.0)), call=(0.1, 0.4), gather=((0.0, 0.0),), once=0.0)
    found = _parted(timed, paper, alone)  # type: ignore[arg-type]
    assert (found == timed) == (named == "reference")
    assert found.call[1] + found.once == pytest.approx(0.4)
    for rows, seconds in timed.backward:
        assert dict(found.backward)[rows] + value_at(found.gather, rows) == pytest.approx(seconds)
    if named == "recompute":
        share = value_at(paper.gather, 8.0) / (value_at(paper.gather, 8.0) + value_at(paper.backward, 8.0))
        assert 0.0 < share < 0.5
        assert value_at(found.gather, 8.0) == pytest.approx(3.0 * share)


@pytest.mark.parametrize("points", [[], [[1.0]], [[2.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 2.0]]])
def test_times_have_to_rise_in_rows(tmp_path: Path, points: list[list[float]]) -> None:
    found = json.loads(calibration().model_dump_json())
    found["layers"][0]["forward"] = points
    (tmp_path / "p.json").write_text(json.dumps(found))
    with pytest.raises(InputError, match="layer 1 has no rising points"):
        read_calibration(tmp_path / "p.json")


def test_ways_of_several_processes() -> None:
    alone = Way(1, "data", 1)
    assert ways([1], ["data", "both"], 8) == [alone]
    assert ways([2, 4], ["data"], 8) == [alone, Way(2, "data", 1), Way(4, "data", 1)]
    assert ways([2, 4], ["pipeline", "both"], 8) == [
        alone,
        Way(2, "pipeline", 2),
        Way(4, "pipeline", 4),
        Way(4, "both", 2),
    ]
    assert ways([8], ["pipeline", "both"], 4) == [alone, Way(8, "both", 4)], "no more stages than layers"
    assert ways([3, 6], ["both"], 2) == [alone, Way(6, "both", 2)]
    assert [str(way.division) for way in ways([4], ["pipeline", "both"], 4)] == [
        "alone",
        "4 stages",
        "2 x 2 stages",
    ]


def test_what_is_left_out_has_a_reason() -> None:
    iwslt = load_recipe("iwslt")
    assert left_out(iwslt, [1, 2, 4], ["data"]) == []
    assert left_out(iwslt, [1], ["pipeline", "both"]) == []
    assert left_out(iwslt, [2, 3, 4], ["data", "pipeline", "both"]) == [
        "division both of 2 processes is not measured: 2 is no product of at least 2 pipelines and 2 to 2 stages",
        "division pipeline of 3 processes is not measured: parallel.pipeline 3: model.encoder and model.decoder have "
        "at most 2 layers; a pipeline has at most as many stages as layers",
        "division both of 3 processes is not measured: 3 is no product of at least 2 pipelines and 2 to 2 stages",
        "division pipeline of 4 processes is not measured: parallel.pipeline 4: model.encoder and model.decoder have "
        "at most 2 layers; a pipeline has at most as many stages as layers",
    ]


@pytest.mark.parametrize(("name", "layers"), [("gnmt", 4), ("iwslt", 2), ("ptb", 2)])
def test_layers_that_a_pipeline_divides(name: str, layers: int) -> None:
    assert stack_of(load_recipe(name)) == layers


@pytest.mark.parametrize(("grown", "gain"), [(False, 2 / 1.25), (True, 2 / 1.25)])
def test_a_prediction_is_a_gain_over_one_process(tmp_path: Path, *, grown: bool, gain: float) -> None:
    there = setting(recipe(tmp_path), grown=grown)
    found = predicted(calibration(), there, Way(2, "data", 1), 100.0, 200.0)
    assert found["predicted tokens/s"] == pytest.approx(100.0 * gain)
    assert found["off %"] == pytest.approx(100.0 * (gain / 2.0 - 1.0))
    assert predicted(calibration(), there, Way(2, "pipeline", 2), 100.0, 200.0) == {}, "it has one layer"


def row(ranks: int, scaling: float, **rest: float) -> Row:
    return {"ranks": ranks, "division": f"{ranks} data", "scaling": scaling, **rest}


def test_the_verdict_counts_predictions_that_hold() -> None:
    found = [row(1, 1.0, **{"off %": 50.0}), row(2, 1.5, **{"off %": -9.9}), row(4, 2.0, **{"off %": 10.1})]
    assert verdict(found) == (
        "over one: 2 processes 1.50x (2 data), 4 processes 2.00x (4 data); 1 of 2 predictions within 10 %, the worst "
        "10 % off"
    )
    assert verdict(found[:1]) == "no way of several processes was measured"
    assert verdict([row(2, 1.5)]) == "over one: 2 processes 1.50x (2 data)"


def tell_place(job: Job) -> Job:
    return {"rank": os.environ["RANK"], "threads": torch.get_num_threads(), "twice": job["number"] * 2}


def fail(_: Job) -> Job:
    if os.environ["RANK"] == "1":
        raise RuntimeError("no more\nof this")
    time.sleep(60)
    return {}


def leave(_: Job) -> Job:
    if os.environ["RANK"] == "0":
        os._exit(3)
    raise EconmtError("rank 0 is gone")


def hang(_: Job) -> Job:
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

    class Work:
        def wait(self) -> bool:
            time.sleep(0.02)
            return True

    def exchange(name: str, work: Work | None) -> Callable[..., Work | None]:
        def call(*_: Any, **__: Any) -> Work | None:
            called.append(name)
            return work

        return call

    for name in ("all_reduce", "all_gather", "broadcast", "reduce"):
        monkeypatch.setattr(dist, name, exchange(name, None))
    for name in ("isend", "irecv"):
        monkeypatch.setattr(dist, name, exchange(name, Work()))
    tensor = torch.zeros(100)
    with _counting() as exchanges:
        dist.all_reduce(tensor)
        dist.all_gather([tensor] * 4, tensor)
        dist.all_reduce(tensor, group=2)
        works = [dist.isend(tensor, 1), dist.irecv(tensor, 1)]
        assert exchanges.seconds < 0.02
        assert [work is not None and work.wait() for work in works] == [True, True]
    dist.all_reduce(tensor)
    assert exchanges.sent == 600.0 + 1200.0 + 400.0 + 400.0, "what is received is another's"
    assert exchanges.seconds >= 0.04
    assert called == ["all_reduce", "all_gather", "all_reduce", "isend", "irecv", "all_reduce"]


@pytest.mark.thorough
def test_two_processes_are_measured_and_predicted(tmp_path: Path) -> None:
    there = setting(recipe(tmp_path))
    found = calibrate(there, 2)
    assert found.sides == 2
    assert [layer.name for layer in found.layers][-1] == "output"
    assert sum(layer.parameters for layer in found.layers) > 1000
    assert all(layer.call[0] + layer.forward[-1][1] > 0 for layer in found.layers if layer.parameters)
    assert found.crowding[0] == [1.0, 1.0]
    assert found.reduction.latency > 0
    alone, both = parallel_measure.rows(there, ways([2], ["data"], 2), lambda _: None, found)
    assert (alone["scaling"], alone["MB sent"]) == (1.0, 0.0)
    for key in ("tokens/s", "scaling", "predicted tokens/s", "MB sent"):
        assert float(both[key]) > 0
    assert "off %" in both


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
    (failed,) = parallel_measure.rows(there, [Way(2, "pipeline", 2)], lambda _: None)
    assert "model.decoder.cell gru cannot be divided over ranks" in str(failed["failure"])


@pytest.mark.thorough
def test_a_pipeline_of_two_processes(tmp_path: Path) -> None:
    (tmp_path / "text.yaml").write_text(TEXT)
    there = setting(read_recipe(tmp_path / "text.yaml"))
    found = list(parallel_measure.rows(there, ways([2], ["pipeline"], 2), lambda _: None))
    assert [row["division"] for row in found] == ["alone", "2 stages"]
    assert "failure" not in found[1]
    assert 0 < float(found[1]["exchange %"]) <= 100
    assert float(found[1]["MB sent"]) > 0


@pytest.mark.thorough
def test_a_way_that_fails_has_a_line_and_the_others_figures(tmp_path: Path) -> None:
    there = setting(recipe(tmp_path))._replace(limit=0.2)
    rows = list(parallel_measure.rows(there, ways([1], [], 1), lambda _: None))
    assert [row.get("failure") for row in rows] == ["not ready within 0 s"]
