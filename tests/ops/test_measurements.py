"""What is remembered of measurements, and what is chosen by them."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from econmt_ops.backends import c as native
from econmt_ops.dispatch import measurements
from econmt_ops.dispatch.measurements import Measurement, MeasurementRecord, Store, decide, machine


def record(milliseconds: float, kept: int = 0) -> MeasurementRecord:
    return MeasurementRecord(milliseconds, milliseconds, milliseconds, kept, 0.0)


RECORDS = {
    "reference": record(4.0, 100),
    "recompute/gates": record(2.0, 50),
    "recompute/outputs": record(3.0, 10),
}


def test_the_fastest_is_chosen() -> None:
    assert decide(RECORDS, "reference") == "recompute/gates"
    measurement = Measurement("lstm", "lstm B=1", "reference", RECORDS)
    assert measurement.choice() == "recompute/gates"
    assert measurement.regret("recompute/gates") == 0.0
    assert measurement.regret("recompute/outputs") == pytest.approx(0.5)
    assert measurement.regret("reference") == pytest.approx(1.0)


@pytest.mark.parametrize(("milliseconds", "chosen"), [(97.1, "rule"), (96.9, "other"), (100.0, "rule")])
def test_the_rule_holds_unless_another_is_clearly_faster(milliseconds: float, chosen: str) -> None:
    assert decide({"other": record(milliseconds), "rule": record(100.0)}, "rule") == chosen


def test_under_a_byte_limit() -> None:
    for limit, chosen in ((100, "gates"), (50, "gates"), (49, "outputs"), (10, "outputs"), (9, "outputs")):
        assert decide(RECORDS, "reference", limit) == f"recompute/{chosen}"


def test_a_rule_that_keeps_too_much_is_not_preferred() -> None:
    records = {"reference": record(2.0, 100), "recompute": record(3.0, 10)}
    assert decide(records, "reference", 99) == "recompute"


def test_what_is_added_is_found_on_the_same_machine_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "choices.json")
    assert store.load("here") == {}
    store.add("here", {"lstm B=1": RECORDS})
    store.add("there", {"lstm B=1": {"reference": record(9.0)}})
    store.add("here", {"lstm B=2": {"reference": record(5.0)}})
    assert Store(store.path).load("here") == {"lstm B=1": RECORDS, "lstm B=2": {"reference": record(5.0)}}
    assert store.load("there") == {"lstm B=1": {"reference": record(9.0)}}
    assert store.load("elsewhere") == {}


def test_a_machine_is_its_libraries_processor_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "processor", lambda: "Abacus 3")
    monkeypatch.setattr(measurements, "sources", lambda: "0123")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    for built, words in ((True, ""), (False, ", no C library")):
        monkeypatch.setattr(native, "is_built", lambda built=built: built)
        found = machine(torch.device("cpu"))
        assert found == f"torch {torch.__version__}, econmt_ops 0123, Abacus 3, 7 threads{words}"


def test_old_machines_are_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path / "choices.json")
    for number in range(measurements._MACHINES + 1):
        store.add(f"machine {number}", {"lstm": RECORDS})
        assert store.load("machine 0") == {"lstm": RECORDS}, "written after others"
        store.add("machine 0", {"lstm": RECORDS})
    assert store.load("machine 0") == {"lstm": RECORDS}
    assert store.load("machine 1") == {}
    assert store.load(f"machine {measurements._MACHINES}") == {"lstm": RECORDS}


BROKEN = {
    "not JSON": "{",
    "a list": "[]",
    "another format": '{"format": "econmt-choices-0", "machines": {}}',
    "no machines": '{"format": "econmt-choices-1"}',
    "too few numbers": '{"format": "econmt-choices-1", "machines": {"here": {"lstm": {"reference": [1, 2]}}}}',
    "no number": '{"format": "econmt-choices-1", "machines": {"here": {"lstm": {"reference": [1, 2, 3, "4", 5]}}}}',
    "infinite": '{"format": "econmt-choices-1", "machines": {"here": {"lstm": {"reference": [1, 2, Infinity, 4, 5]}}}}',
    "no time": '{"format": "econmt-choices-1", "machines": {"here": {"lstm": {"reference": [0, 2, 3, 4, 5]}}}}',
    "deep": "[" * 100_000,
    "bytes": "\udcff",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_left_aside_and_written_anew(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path / "choices.json")
    store.path.write_bytes(content.encode("utf-8", errors="surrogateescape"))
    with pytest.warns(RuntimeWarning, match="choices.json: ignoring the broken file of measurements"):
        assert store.load("here") == {}
    with pytest.warns(RuntimeWarning, match="ignoring the broken file"):
        store.add("here", {"lstm": RECORDS})
    assert store.load("here") == {"lstm": RECORDS}


def test_a_folder_that_cannot_be_written_costs_a_warning_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "choices.json")
    with pytest.warns(RuntimeWarning, match="cannot store measurements"):
        store.add("here", {"lstm": RECORDS})


def add_many(path: Path, process: int) -> None:
    for number in range(20):
        Store(path).add("here", {f"{process}.{number}": RECORDS})


@pytest.mark.thorough
def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=add_many, args=(path, number)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert set(Store(path).load("here")) == {f"{p}.{n}" for p in range(2) for n in range(20)}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["choices.json", "choices.lock"]


def test_the_file_holds_numbers(tmp_path: Path) -> None:
    store = Store(tmp_path / "choices.json")
    store.add("here", {"lstm": {"reference": MeasurementRecord(1.5, 1.0, 2.0, 12, 0.25)}})
    content = json.loads(store.path.read_text())
    assert content["machines"] == {"here": {"lstm": {"reference": [1.5, 1.0, 2.0, 12, 0.25]}}}
