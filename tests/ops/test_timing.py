"""Functions are timed in turns and never beyond the time allowed; what is remembered, and chosen by it."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from econmt_ops.backends import c as native
from econmt_ops.dispatch import measurements
from econmt_ops.dispatch.measurements import Measurement, MeasurementRecord, Store, decide, machine
from econmt_ops.dispatch.rule import Problem
from econmt_ops.dispatch.timing import Timing, alternate, compared, quantile, ratio


class Communicator:
    """Functions that take as long as they are told, and note when they were called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now

    def taking(self, name: str, *seconds: float) -> Callable[[], None]:
        """A function that takes these times, the last one from then on."""
        left = list(seconds)

        def run() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def time_all(
    functions: dict[str, tuple[float, ...]], seconds: float, **options: Any
) -> tuple[Communicator, dict[str, Timing]]:
    communicator = Communicator()
    timed = {name: communicator.taking(name, *times) for name, times in functions.items()}
    found = alternate(timed, seconds, clock=communicator.clock, **options)
    assert found is not None
    return communicator, found


def test_they_take_turns_and_the_median_forgets_what_disturbed() -> None:
    communicator, found = time_all({"a": (0.5, 0.1), "b": (0.5, 0.12)}, 100.0, most=3)
    assert communicator.calls == ["a", "b"] * 4
    for name, seconds in (("a", 0.1), ("b", 0.12)):
        assert found[name][:3] == pytest.approx((seconds,) * 3)
        assert found[name].samples == pytest.approx((seconds,) * 3)
        assert found[name].first == 0.5
    _, found = time_all({"a": (1.0, 1.0, 9.0, 1.0, 1.2, 1.0)}, 100.0, most=5)
    assert found["a"].median == pytest.approx(1.0)
    assert found["a"].high == pytest.approx(quantile([1.0, 9.0, 1.0, 1.2, 1.0], 0.9))


def test_hopeless_ones_are_left() -> None:
    times = {"good": (0.1,), "slow first": (9.0, 0.1), "slow": (0.2,), "slowest": (1.0,)}
    communicator, found = time_all(times, 99.0, most=4)
    # Four samples of each function are sixteen, of which the slow ones took two.
    assert communicator.calls.count("good") == communicator.calls.count("slow first") == 1 + 7
    assert communicator.calls.count("slow") == 2
    assert communicator.calls.count("slowest") == 2
    assert found["slowest"].median == pytest.approx(1.0)
    assert found["slow"].median == pytest.approx(0.2)
    communicator, _ = time_all({"good": (0.1,), "slow": (0.2,), "slowest": (1.0,)}, 99.0, most=4, drop=False)
    assert communicator.calls.count("slowest") == 5
    communicator, _ = time_all({"good": (0.1,), "slowest": (1.0,)}, 99.0, most=4)
    assert (communicator.calls.count("good"), communicator.calls.count("slowest")) == (5, 2)


def test_one_disturbed_call_makes_none_hopeless() -> None:
    communicator, found = time_all({"good": (0.1, 0.9, 0.1), "other": (0.12,)}, 99.0, most=4)
    assert communicator.calls.count("good") == communicator.calls.count("other") == 5
    assert found["good"].median == pytest.approx(0.1)


def test_after_some_turns_only_those_near_to_the_fastest_go_on() -> None:
    times = {"a": (0.1,), "far": (0.12,), "near": (0.105,), "hopeless": (0.2,)}
    communicator, found = time_all(times, 99.0, most=20)
    # 80 samples in all: 1 of the hopeless one, 8 of the far one, the rest for two.
    counts = {name: len(timing.samples) for name, timing in found.items()}
    assert counts == {"a": 35, "near": 35, "far": 8, "hopeless": 1}
    assert set(communicator.calls[-54:]) == {"a", "near"}
    communicator, found = time_all({"a": (0.1,), "far": (0.12,)}, 99.0, most=20)
    assert {name: len(timing.samples) for name, timing in found.items()} == {"a": 8, "far": 8}
    _, found = time_all({"only": (0.1,)}, 99.0, most=20)
    assert len(found["only"].samples) == 20
    communicator, found = time_all({"a": (0.1,), "far": (0.12,), "b": (0.11,)}, 99.0, most=20, drop=False)
    assert {len(timing.samples) for timing in found.values()} == {20}


def test_the_key_of_a_problem_has_what_its_best_candidate_depends_on() -> None:
    """Sizes that follow from others are left out."""
    weight = torch.ones(2, requires_grad=True)
    problem = Problem("lstm", (weight,), torch.bfloat16, {"T": 3, "T+1": 4, "B": 2}, "2 layers")
    assert problem.key == "lstm T=3 B=2 2 layers bfloat16 backward"
    assert problem._replace(detail="").key == "lstm T=3 B=2 bfloat16 backward"
    with torch.no_grad():
        assert problem.key.endswith(" forward")
    assert problem._replace(arguments=(torch.ones(2),)).key.endswith(" forward")


def test_of_what_is_enough_only_the_least_is_more() -> None:
    for enough, samples in ((0.0, 3), (1.0, 4), (2.1, 10), (9.0, 20)):
        _, found = time_all({"a": (0.1,), "b": (0.105,)}, 99.0, most=20, enough=enough)
        assert {len(timing.samples) for timing in found.values()} == {samples}


def test_what_may_not_run_drops_nothing() -> None:
    times = {"quick": (0.01,), "a": (0.1,), "b": (0.105,), "slow": (0.2,)}
    _, found = time_all(times, 99.0, most=10, fits=lambda name: name != "quick")
    counts = {name: len(timing.samples) for name, timing in found.items()}
    assert counts["slow"] == 1
    assert counts["a"] == counts["b"] > 10
    _, found = time_all(times, 99.0, most=10, fits=lambda _: False)
    assert {len(timing.samples) for timing in found.values()} == {10}


def test_a_machine_that_gets_faster_in_the_middle_of_a_turn_drops_nothing() -> None:
    communicator = Communicator()
    speed = iter([1.0] * 7 + [0.5] * 100)

    def run(seconds: float) -> Callable[[], None]:
        def call() -> None:
            communicator.now += seconds * next(speed)

        return call

    found = alternate({"a": run(0.1), "b": run(0.11)}, 99.0, clock=communicator.clock, most=5)
    assert found is not None
    assert found["a"].samples == pytest.approx((0.1, 0.1, 0.1, 0.05, 0.05))
    assert found["b"].samples == pytest.approx((0.11, 0.11, 0.055, 0.055, 0.055))


def test_a_ratio_is_the_median_over_the_turns_of_both() -> None:
    assert ratio((1.0, 3.0, 5.0), (2.0, 2.0, 4.0)) == pytest.approx(1.25)
    assert ratio((1.0, 3.0), (2.0, 2.0, 100.0)) == pytest.approx(1.0)


def test_functions_are_compared_in_the_turns_of_both() -> None:
    samples = {"a": (4.0, 4.0, 2.0, 2.0, 2.0), "dropped": (6.0, 6.0), "slow": (9.0, 9.0, 5.0, 5.0, 5.0)}
    assert compared(samples) == pytest.approx({"a": 2.0, "dropped": 3.0, "slow": 5.0})
    assert compared({"only": (3.0, 1.0, 2.0)}) == pytest.approx({"only": 2.0})


def test_those_that_remain_are_compared_in_the_turns_that_they_took_alone() -> None:
    samples = {"a": (1.0,) * 23, "b": (1.05,) * 15 + (0.9,) * 8, "c": (1.2,) * 15}
    assert compared(samples) == pytest.approx({"a": 1.05 / 0.9, "b": 1.05, "c": 1.2 * 1.05 / 1.05})
    few = {"a": (1.0,) * 22, "b": (1.05,) * 15 + (0.9,) * 7, "c": (1.2,) * 15}
    assert compared(few) == pytest.approx({"a": 1.0, "b": 1.05, "c": 1.2})


@pytest.mark.parametrize(
    ("times", "seconds", "calls"),
    [
        # After the first call of a, three more rounds of both must seem possible.
        ({"a": (1.0,), "b": (1.0,)}, 7.0, None),
        ({"a": (1.0,), "b": (1.0,)}, 6.9, "a"),
        ({"a": (1.0,), "b": (1.0,)}, 8.0, "abababab"),
        ({"a": (1.0,), "b": (1.0,)}, 10.0, "ababababab"),
        # Two samples are too few, three are enough if the next would take too long.
        ({"a": (1.0, 1.0, 5.0, 1.0)}, 7.5, None),
        ({"a": (1.0, 1.0, 1.0, 5.0, 1.0)}, 8.5, "aaaa"),
    ],
)
def test_no_round_is_begun_that_would_take_too_long(
    times: dict[str, tuple[float, ...]], seconds: float, calls: str | None
) -> None:
    communicator = Communicator()
    functions = {name: communicator.taking(name, *each) for name, each in times.items()}
    found = alternate(functions, seconds, clock=communicator.clock)
    assert (found is None) == (calls is None or calls == "a")
    assert calls is None or "".join(communicator.calls) == calls


def test_short_calls_are_repeated_and_the_number_of_repetitions_never_falls() -> None:
    communicator, found = time_all({"a": (1e-4,) * 12 + (0.1,)}, 100.0, most=3)
    assert len(communicator.calls) == 1 + 3 * 10
    assert found["a"].samples[0] == pytest.approx(1e-4)


def test_one_that_is_far_behind_after_the_turns_that_decide_goes_on() -> None:
    _, found = time_all({"a": (0.1,), "b": (0.105,) * 9 + (0.14,), "c": (0.105,)}, 99.0, most=20)
    assert {len(timing.samples) for timing in found.values()} == {20}


def test_the_device_is_waited_for() -> None:
    communicator = Communicator()
    wait = communicator.taking("wait", 0.5)
    alternate({"a": communicator.taking("a", 1.0)}, 9.0, clock=communicator.clock, most=1, synchronize=wait)
    assert communicator.calls == ["wait", "a", "wait"] * 2


def test_quantiles() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == pytest.approx(2.5)
    assert quantile([1.0], 0.9) == 1.0
    assert quantile([0.0, 10.0], 0.1) == pytest.approx(1.0)


def record(milliseconds: float, kept: int = 0) -> MeasurementRecord:
    return MeasurementRecord(milliseconds, milliseconds, milliseconds, kept, 0.0)


RECORDS = {"reference": record(4.0, 100), "recompute/gates": record(2.0, 50)}
RECORDS["recompute/outputs"] = record(3.0, 10)


def test_the_fastest_is_chosen() -> None:
    measurement = Measurement("lstm", "lstm B=1", "reference", RECORDS)
    assert measurement.choice() == "recompute/gates"
    assert measurement.regret("recompute/gates") == 0.0
    assert measurement.regret("recompute/outputs") == pytest.approx(0.5)
    assert measurement.regret("reference") == pytest.approx(1.0)


def test_every_choice_of_three_is_that_of_the_definition() -> None:
    """Times at the margin and equal ones, bytes at the limit and beyond it."""
    names = "rule", "one", "other"
    rows = list(product((96.0, 97.0, 100.0), (1, 2, 3)))
    for limit in (None, 0, 1, 2):
        for each in product(rows, repeat=3):
            times, kept = (
                {name: row[part] for name, row in zip(names, each, strict=True)} for part in (0, 1)
            )
            fitting = [name for name in names if limit is None or kept[name] <= limit]
            if not fitting:
                expected = min(names, key=lambda name, k=kept, t=times: (k[name], t[name], names.index(name)))
            else:
                expected = min(fitting, key=lambda name, t=times: (t[name], names.index(name)))
                if "rule" in fitting and times[expected] / times["rule"] >= 0.97:
                    expected = "rule"
            records = {name: MeasurementRecord(times[name], 0.0, 0.0, kept[name], 0.0) for name in names}
            assert decide(records, "rule", limit) == expected, (limit, each)


def test_what_is_added_is_found_on_the_same_machine_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "choices.json")
    assert store.load("here") == {}
    store.add("here", {"lstm B=1": RECORDS})
    store.add("there", {"lstm B=1": {"reference": record(9.0)}})
    store.add("here", {"lstm B=2": {"reference": record(5.0)}})
    assert Store(store.path).load("here") == {"lstm B=1": RECORDS, "lstm B=2": {"reference": record(5.0)}}
    assert store.load("there") == {"lstm B=1": {"reference": record(9.0)}}
    assert store.load("elsewhere") == {}
    store.add("here", {"gru B=1": RECORDS}, replacing="lstm B=1")
    assert store.load("here").keys() == {"lstm B=2", "gru B=1"}


def test_a_machine_is_its_libraries_processor_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "processor", lambda: "Abacus 3")
    monkeypatch.setattr(measurements, "sources", lambda: "0123")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    for built, words in ((True, ""), (False, ", no C library")):
        monkeypatch.setattr(native, "is_built", lambda built=built: built)
        found = machine(torch.device("cpu"))
        assert found == f"torch {torch.__version__}, econmt_ops 0123, Abacus 3, 7 threads{words}"


def test_another_source_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "__file__", str(tmp_path / "dispatch" / "measurements.py"))
    digests = {measurements.sources.__wrapped__()}
    (tmp_path / "backends").mkdir()
    for name in ("gru.py", "backends/gru.c", "tanh.h", "backends/adam.cu", "decoder.cuh"):
        (tmp_path / name).write_text("kernel")
        digests.add(measurements.sources.__wrapped__())
    assert len(digests) == 6


def test_old_machines_are_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path / "choices.json")
    for number in range(measurements._MACHINES + 1):
        store.add(f"machine {number}", {"lstm": RECORDS})
        assert store.load("machine 0") == {"lstm": RECORDS}, "written after others"
        store.add("machine 0", {"lstm": RECORDS})
    assert store.load("machine 0") == {"lstm": RECORDS}
    assert store.load("machine 1") == {}
    kept = [number for number in range(20) if store.load(f"machine {number}")]
    assert kept == [0, *range(2, measurements._MACHINES + 1)]


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
