"""Functions are timed in turns, hopeless ones not for long, and never beyond the time allowed; on a clock of our own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from econmt_ops.timing import Timing, alternate, quantile


class World:
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
    functions: dict[str, tuple[float, ...]], seconds: float, **options: int
) -> tuple[World, dict[str, Timing]]:
    world = World()
    found = alternate(
        {name: world.taking(name, *times) for name, times in functions.items()},
        seconds,
        clock=world.clock,
        **options,  # type: ignore[arg-type]
    )
    assert found is not None
    return world, found


def test_they_take_turns() -> None:
    world, found = time_all({"a": (0.5, 0.1), "b": (0.5, 0.12)}, 100.0, most=3)
    assert world.calls == ["a", "b"] * 4
    for name, seconds in (("a", 0.1), ("b", 0.12)):
        assert found[name][:3] == pytest.approx((seconds,) * 3)
        assert found[name].samples == pytest.approx((seconds,) * 3)
        assert found[name].first == 0.5


def test_the_median_forgets_what_disturbed() -> None:
    _, found = time_all({"a": (1.0, 1.0, 9.0, 1.0, 1.2, 1.0)}, 100.0, most=5)
    assert found["a"].median == pytest.approx(1.0)
    assert found["a"].high == pytest.approx(quantile([1.0, 9.0, 1.0, 1.2, 1.0], 0.9))


def test_hopeless_ones_are_left() -> None:
    world, found = time_all(
        {"good": (0.1,), "slow first": (9.0, 0.1), "slow": (0.2,), "slowest": (1.0,)}, 99.0, most=4
    )
    assert world.calls.count("good") == world.calls.count("slow first") == 5
    assert world.calls.count("slow") == 2
    assert world.calls.count("slowest") == 2
    assert found["slowest"].median == pytest.approx(1.0)
    assert found["slow"].median == pytest.approx(0.2)
    world, _ = time_all({"good": (0.1,), "slow": (0.2,), "slowest": (1.0,)}, 99.0, most=4, drop=False)
    assert world.calls.count("slowest") == 5


def test_one_disturbed_call_makes_none_hopeless() -> None:
    world, found = time_all({"good": (0.1, 0.9, 0.1), "other": (0.12,)}, 99.0, most=4)
    assert world.calls.count("good") == world.calls.count("other") == 5
    assert found["good"].median == pytest.approx(0.1)


def test_short_calls_are_repeated() -> None:
    world, found = time_all({"a": (1e-4,)}, 100.0, most=2)
    assert len(world.calls) == 1 + 2 * 10
    assert found["a"].median == pytest.approx(1e-4)


def test_time_is_kept() -> None:
    world, found = time_all({"a": (1.0,), "b": (1.1,)}, 10.0)
    assert world.now <= 10.0
    assert len(found["a"].samples) == 3


@pytest.mark.parametrize("first", [0.9, 2.0, 50.0])
def test_time_that_does_not_suffice(first: float) -> None:
    world = World()
    functions = {"a": world.taking("a", first), "b": world.taking("b", first)}
    assert alternate(functions, 3.0, clock=world.clock) is None
    assert world.now <= max(3.0, first)


def test_the_device_is_waited_for() -> None:
    world = World()
    alternate(
        {"a": world.taking("a", 1.0)}, 9.0, clock=world.clock, most=1, synchronize=world.taking("wait", 0.5)
    )
    assert world.calls == ["wait", "a", "wait"] * 2


def test_quantiles() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == pytest.approx(2.5)
    assert quantile([1.0], 0.9) == 1.0
    assert quantile([0.0, 10.0], 0.1) == pytest.approx(1.0)
