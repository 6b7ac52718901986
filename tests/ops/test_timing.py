"""Functions are timed in turns, hopeless ones not for long, and never beyond the time allowed; on a clock of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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


def test_they_take_turns() -> None:
    communicator, found = time_all({"a": (0.5, 0.1), "b": (0.5, 0.12)}, 100.0, most=3)
    assert communicator.calls == ["a", "b"] * 4
    for name, seconds in (("a", 0.1), ("b", 0.12)):
        assert found[name][:3] == pytest.approx((seconds,) * 3)
        assert found[name].samples == pytest.approx((seconds,) * 3)
        assert found[name].first == 0.5


def test_the_median_forgets_what_disturbed() -> None:
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
    """Before, b ran after c, which made it look slower than a."""
    samples = {"a": (1.0,) * 24, "b": (1.05,) * 15 + (0.9,) * 9, "c": (1.2,) * 15}
    assert compared(samples) == pytest.approx({"a": 1.05 / 0.9, "b": 1.05, "c": 1.2 * 1.05 / 1.05})
    few = {"a": (1.0,) * 22, "b": (1.05,) * 15 + (0.9,) * 7, "c": (1.2,) * 15}
    assert compared(few) == pytest.approx({"a": 1.0, "b": 1.05, "c": 1.2})


def test_short_calls_are_repeated() -> None:
    communicator, found = time_all({"a": (1e-4,)}, 100.0, most=2)
    assert len(communicator.calls) == 1 + 2 * 10
    assert found["a"].median == pytest.approx(1e-4)


def test_time_is_kept() -> None:
    communicator, found = time_all({"a": (1.0,), "b": (1.1,)}, 10.0)
    assert communicator.now <= 10.0
    assert len(found["a"].samples) == 3


@pytest.mark.parametrize("first", [0.9, 2.0, 50.0])
def test_time_that_does_not_suffice(first: float) -> None:
    communicator = Communicator()
    functions = {"a": communicator.taking("a", first), "b": communicator.taking("b", first)}
    assert alternate(functions, 3.0, clock=communicator.clock) is None
    assert communicator.now <= max(3.0, first)


def test_the_device_is_waited_for() -> None:
    communicator = Communicator()
    wait = communicator.taking("wait", 0.5)
    alternate({"a": communicator.taking("a", 1.0)}, 9.0, clock=communicator.clock, most=1, synchronize=wait)
    assert communicator.calls == ["wait", "a", "wait"] * 2


def test_quantiles() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == pytest.approx(2.5)
    assert quantile([1.0], 0.9) == 1.0
    assert quantile([0.0, 10.0], 0.1) == pytest.approx(1.0)
