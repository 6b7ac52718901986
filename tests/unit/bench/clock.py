"""Times of implementations that tests of choices make up, in place of measured ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from econmt_ops.dispatch import session
from econmt_ops.dispatch.timing import Timing


class Clock:
    """Stands for `alternate`: calls each function once and tells the time given for its name, else its samples."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self.samples: dict[str, tuple[float, ...]] = {}

    def __call__(
        self, functions: dict[str, Callable[[], object]], seconds: float, **_: object
    ) -> dict[str, Timing]:
        assert seconds > 0
        for function in functions.values():
            function()
        samples = {name: self.samples.get(name, (1.0,) * 3) for name in functions}
        times = dict.fromkeys(functions, 1.0)
        if self.rounds:
            times |= {name: time for name, time in self.rounds.pop(0).items() if name in functions}
            samples = {name: (time,) * 3 for name, time in times.items()}
        return {name: Timing(times[name], times[name] / 2, 2.0, samples[name], 1.5) for name in functions}


def made_up_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Clock]:
    """Puts a clock in the place of measurements; a fixture of the files that need it."""
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    found = Clock()
    monkeypatch.setattr(session, "alternate", found)
    monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    session.forget()
    yield found
    session.forget()
