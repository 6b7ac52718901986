"""How ranks of a run stay together: they see one folder, leave at one update, part at its end, and tell who is slow."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch.distributed as dist

from econmt.parallel import processes
from econmt.parallel.processes import _Watch
from tests.conftest import PATIENCE
from tests.unit.parallel import jobs
from tests.unit.parallel.group import Group
from tests.unit.parallel.test_data_parallel import recipe_in


@pytest.mark.slow
def test_a_slow_rank_is_named_in_the_log(group: Group, text: Path, tmp_path: Path) -> None:
    path = recipe_in(tmp_path, text)
    said, other = group.run(2, jobs.run_slowly, path, text)
    assert other == ""
    assert said.count("rank 1 (") == 2, "at updates 3 and 6"
    assert "all ranks wait for it" in said
    assert "is slow" in (tmp_path / "run" / "log").read_text()


def test_all_leave_at_one_update_and_part_at_the_end(group: Group, text: Path, tmp_path: Path) -> None:
    path = recipe_in(tmp_path, text)
    said = group.run(2, jobs.leave_at, path, text, 3)
    assert all("SIGTERM: saved at update 4" in each for each in said), said
    assert group.run(2, jobs.parts, recipe_in(tmp_path, text), text) == [[True, False, True]] * 2


def test_a_rank_that_does_not_see_the_folder_says_so(group: Group, text: Path, tmp_path: Path) -> None:
    said = group.run(2, jobs.run_elsewhere, recipe_in(tmp_path, text), text)
    assert "rank 1 (" in said[0]
    assert "cannot see the model folder of rank 0" in said[0]
    assert "in a folder that all hosts share" in said[1]
    assert [*(tmp_path / "run0").glob(".ranks*")] == []


def test_a_rank_that_hangs_is_named_when_the_others_have_waited_long_enough(group: Group) -> None:
    found = group.run(2, jobs.hang, timeout=600)
    (line,) = found[0] + found[1]
    assert line.startswith("econmt: error: rank 1 (")
    assert "did not reach a collective operation after update 7 within 600 s; all ranks stop" in line


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_whoever_keeps_the_store_is_gone_one_rank_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    ended = [threading.Event(), threading.Event()]
    monkeypatch.setattr(processes, "talk", said.append)
    monkeypatch.setenv("MASTER_PORT", str(os.getpid()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def leave(_: int) -> NoReturn:
        ended[int(threading.current_thread() is watches[1])].set()
        raise SystemExit

    monkeypatch.setattr(os, "_exit", leave)
    # The rank that tells stays until the other has left.
    wait = SimpleNamespace(sleep=lambda _: ended[threading.current_thread() is watches[0]].wait(PATIENCE))
    monkeypatch.setattr(processes, "time", wait)
    keeper = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", keeper.port, is_master=False) for _ in range(4)]
    watches = [_Watch(rank, 2, *stores[2 * rank : 2 * rank + 2], 120) for rank in range(2)]
    for watch in watches:
        watch.update = 5
        watch.start()
    del keeper
    assert all(each.wait(PATIENCE) for each in ended)
    (line,) = said
    assert "has lost rank 0, which holds the store at " in line
    assert "after update 5; all ranks stop; run the same command to resume from the last saved state" in line
