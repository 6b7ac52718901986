"""What was measured today holds all day, whatever becomes of its file."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from econmt.engine import measurement_cache as module
from econmt.engine.measurement_cache import cache_file, measured_today


class Clock:
    """Measures something else each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Mapping[str, float]:
        self.calls += 1
        return {"one": float(self.calls)}


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    return Clock()


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

    class Tomorrow(dt.date):
        @classmethod
        def today(cls) -> dt.date:
            return dt.date(2999, 1, 1)

    monkeypatch.setattr(module.dt, "date", Tomorrow)
    assert measured_today("a", clock) == {"one": 2.0}
    assert list(json.loads(cache_file().read_text())) == ["date", "measured"]


@pytest.mark.parametrize(
    "times", ["[]", "{}", '{"one": "1"}', '{"one": -1.0}', '{"one": NaN}', '{"one": true}']
)
def test_broken_entries_are_measured_anew(clock: Clock, times: str) -> None:
    measured_today("a", clock)
    (key,) = json.loads(cache_file().read_text())["measured"]
    today = dt.date.today().isoformat()
    cache_file().write_text(f'{{"date": "{today}", "measured": {{{json.dumps(key)}: {times}}}}}')
    assert measured_today("a", clock) == {"one": 2.0}


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[1]", b'{"date": 3}', b'{"measured": {}}', b"[" * 100_000]
)
def test_a_broken_file_is_written_anew(clock: Clock, content: bytes) -> None:
    cache_file().parent.mkdir(parents=True)
    cache_file().write_bytes(content)
    assert measured_today("a", clock) == measured_today("a", clock) == {"one": 1.0}


def test_where_nothing_can_be_written_each_command_measures(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert measured_today("a", clock) == {"one": 1.0}
    assert measured_today("a", clock) == {"one": 2.0}
