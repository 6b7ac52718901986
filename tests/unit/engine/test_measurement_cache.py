"""What was measured today holds all day, whatever becomes of its file."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from econmt.engine import machine as module
from econmt.engine.machine import measured_today
from econmt_ops.dispatch.measurements import MeasurementRecord, Store, machine

Clock = Callable[[], Mapping[str, float]]


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Measures something else each time."""
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    calls = itertools.count(1)
    return lambda: {"one": float(next(calls))}


def test_a_second_process_finds_what_the_first_measured(clock: Clock) -> None:
    assert measured_today("a", clock) == measured_today("a", clock) == {"one": 1.0}
    assert measured_today("b", clock) == {"one": 2.0}
    assert measured_today("a", clock) == {"one": 1.0}


def test_another_number_of_threads_is_measured_anew(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_today("a", clock)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert measured_today("a", clock) == {"one": 2.0}


def test_tomorrow_is_measured_anew(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_today("a", clock)
    Store().add(machine(torch.device("cpu")), {"op": {"rule": MeasurementRecord(1.0, 1.0, 1.0, 0, 0.0)}})

    class Tomorrow(dt.date):
        @classmethod
        def today(cls) -> dt.date:
            return dt.date(2999, 1, 1)

    monkeypatch.setattr(module.dt, "date", Tomorrow)
    assert measured_today("a", clock) == {"one": 2.0}
    (entries,) = json.loads(Store().path.read_text())["machines"].values()
    assert list(entries) == ["op", "a, 2999-01-01"]


@pytest.mark.parametrize("content", ["", '{"machines": {}}', '[["a", {"one": [-1.0, 1, 1, 0, 0]}]]'])
@pytest.mark.filterwarnings("ignore:econmt_ops:RuntimeWarning")
def test_a_broken_file_is_written_anew(clock: Clock, content: str) -> None:
    Store().path.parent.mkdir(parents=True)
    Store().path.write_text(content)
    assert measured_today("a", clock) == measured_today("a", clock) == {"one": 1.0}


def test_where_nothing_can_be_written_each_command_measures(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert measured_today("a", clock) == {"one": 1.0}
    assert measured_today("a", clock) == {"one": 2.0}
