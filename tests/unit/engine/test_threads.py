"""How many threads compute, and the warnings of too many and of a missing C library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from econmt.api import commands
from econmt.engine import threads
from econmt.engine.threads import candidates, crowded, fewest, threads_for, time_steps
from econmt.training.run import run_recipe
from tests.unit.training.tiny import Run, write_text

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of four cores, on which four threads are the fastest by a little and two by much."""
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(threads, "time_steps", lambda *_: {"1": 4e-3, "2": 2e-3, "4": 1.9e-3})


@pytest.mark.usefixtures("four")
def test_the_fewest_that_nothing_beats_by_much() -> None:
    found = threads_for(None, CPU, 128)
    assert found.number == 2
    assert found.why == (
        "auto: a step takes 4.00 ms with 1, 2.00 ms with 2, 1.90 ms with 4; more threads must be 1.1 times as fast; measured once a day"
    )


@pytest.mark.usefixtures("four")
def test_processes_of_a_host_share_its_cores() -> None:
    assert threads_for(None, CPU, 128, saved=4, processes=2) == (2, "2 processes share the 4 cores")
    assert threads_for(None, CPU, 128, processes=9).number == 1
    assert threads_for(3, CPU, 128, processes=2) == (3, "set by the recipe or --threads")
    assert threads_for(None, GPU, 128, processes=2).number == 4


@pytest.mark.usefixtures("four")
def test_what_is_known_goes_before_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_for(3, CPU, 128, saved=1) == (3, "set by the recipe or --threads")
    assert threads_for(None, CPU, 128, saved=1) == (1, "as at the beginning of the run")
    assert threads_for(None, GPU, 128).number == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads_for(None, CPU, 128) == (4, "set by OMP_NUM_THREADS")


@pytest.mark.usefixtures("four")
def test_a_measurement_is_kept_for_models_of_like_width(monkeypatch: pytest.MonkeyPatch) -> None:
    threads_for(None, CPU, 100)
    monkeypatch.setattr(threads, "time_steps", lambda *_: {"1": 1.0, "2": 0.1})
    assert threads_for(None, CPU, 128).number == 2  # not what would be measured now, but the same
    assert "0.10 s" not in threads_for(None, CPU, 128).why
    assert "100.00 ms with 2" in threads_for(None, CPU, 5000).why


def test_powers_of_two_are_tried_and_near_ties_go_to_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [candidates(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    monkeypatch.setattr(threads, "MARGIN", 1.25)
    assert fewest({"1": 5.0, "2": 4.0, "4": 4.0}) == 1
    assert fewest({"1": 5.01, "2": 4.0, "4": 3.2, "8": 20.0}) == 2
    assert fewest({"1": 6.0, "2": 4.0, "4": 3.19}) == 4


def test_steps_are_timed_and_the_threads_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    found = time_steps(64, [1, 2])
    assert list(found) == ["1", "2"]
    assert min(found.values()) > 0.0
    assert torch.get_num_threads() == before
    monkeypatch.setattr(torch, "mm", None)
    with pytest.raises(TypeError):
        time_steps(64, [before + 1])
    assert torch.get_num_threads() == before


def test_too_many_threads_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = "wait for one another; --threads"
    busy = f"6 processes already use the 2 cores of this machine, and 2 threads {wait} 1 may be faster"
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    slow = f"8 threads on 2 cores {wait} 2 is faster"
    for load, count, warning in ((0.5, 2, None), (0.5, 8, slow), (6.1, 1, None), (6.1, 2, busy)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load,) * 3, raising=False)
        assert crowded(count) == warning


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.native, "is_built", lambda: False)
    commands._warn_of_library.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_commands_tell_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        commands.warn_of_slowness()
    lines = [line for line in capsys.readouterr().err.splitlines() if "C library" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "econmt: warning: econmt was installed without its C library: on a CPU it translates"
    )
    commands._warn_of_library.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_a_run_tells_it(tmp_path: Path) -> None:
    write_text(tmp_path, {"train": 12, "valid": 3})
    run = Run(tmp_path, tmp_path / "run", ("training.max_updates=1",))
    run_recipe(run.recipe, [tmp_path], console=run.console)
    assert run.said().count("warning: econmt was installed without its C library") == 1


def test_nothing_is_told_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert threads.missing_library() is None
    commands._warn_of_library.cache_clear()
    commands.warn_of_slowness()
    assert "C library" not in capsys.readouterr().err
