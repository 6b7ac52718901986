"""A launcher or a rank that is killed at any moment: no process stays, one line tells, the next command goes on."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from econmt.checkpoint.folder import ModelFolder
from tests.conftest import PATIENCE, econmt_environment, run_python
from tests.unit.parallel.processes_of_run import (
    MARK,
    connections_to,
    imports_torch,
    port_of,
    processes_of_run,
    ranks_of_run,
    seconds_until_all_ended,
)
from tests.unit.parallel.test_data_parallel import recipe_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

ENDED = 300.0
"""Seconds in which all processes of a run have ended: less than those for which they would sleep."""


class Run:
    """``econmt train RECIPE --processes 2``, and what it says."""

    def __init__(self, folder: Path, text: Path, *options: str) -> None:
        self.folder, self.mark = ModelFolder(folder / "run"), secrets.token_hex(8)
        self._said = folder / "said"
        path = recipe_in(folder, text)
        command = [sys.executable, "-m", "econmt", "train", str(path), "--data-dir", str(text)]
        patience = "training.early_stopping.max_num_checkpoint_not_improved=null"
        settings = ["data.prepared=null", "training.max_updates=100000", patience]
        command += [*settings, "--processes", "2", *options]
        environment = econmt_environment({MARK: self.mark})
        with self._said.open("wb") as file:
            self.launcher = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    @property
    def said(self) -> str:
        return self._said.read_text()

    def ranks(self) -> dict[int, int]:
        return ranks_of_run(self.mark)

    def wait_until(self, reached: Callable[[], object]) -> None:
        until = time.monotonic() + PATIENCE
        while not reached():
            assert self.launcher.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.02)

    def wait_until_it_trains(self) -> None:
        self.wait_until(self.folder.commits)

    def end(self) -> None:
        for process in processes_of_run(self.mark):
            os.kill(process, signal.SIGKILL)
        self.launcher.wait()


@pytest.fixture
def start(tmp_path: Path, text: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*options: str) -> Run:
        runs.append(Run(tmp_path, text, *options))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def wait_for_rendezvous(run: Run, reached: Callable[[], object] | None = None) -> None:
    """Waits until rank 0 waits for rank 1, which is stopped while it imports torch."""
    run.wait_until(reached or (lambda: imports_torch(run.ranks().get(1, 0))))
    os.kill(run.ranks()[1], signal.SIGSTOP)
    port = port_of(run.ranks()[0])
    run.wait_until(lambda: connections_to(port) > 1)  # one is the launcher's


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda run: run.wait_until(lambda: len(run.ranks()) == 2), id="start"),
        pytest.param(wait_for_rendezvous, marks=pytest.mark.slow),
        pytest.param(Run.wait_until_it_trains, marks=pytest.mark.slow),
    ],
)
def test_no_rank_outlives_its_launcher(start: Callable[..., Run], wait: Callable[[Run], None]) -> None:
    run = start()
    wait(run)
    assert run.ranks()
    run.launcher.kill()
    run.launcher.wait()
    assert seconds_until_all_ended(run.mark, ENDED) < ENDED


RANK = """
import sys, time
sys.platform = sys.argv[1]
from econmt.parallel.orphans import end_with_launcher
end_with_launcher()
print("ready", flush=True)
time.sleep(600)
"""

LAUNCHER = """
import os, subprocess, sys
platform, code = sys.argv[1:]
os.environ |= {"TORCHELASTIC_RUN_ID": "run", "ECONMT_LAUNCHER": str(os.getpid())}
rank = subprocess.Popen([sys.executable, "-c", code, platform], stdout=subprocess.PIPE)
sys.exit(rank.stdout.readline() != b"ready\\n")
"""


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_rank_ends_with_its_launcher_on_any_system(platform: str) -> None:
    mark = secrets.token_hex(8)
    command = [sys.executable, "-c", LAUNCHER, platform, RANK]
    assert subprocess.run(command, env=econmt_environment({MARK: mark}), check=False).returncode == 0
    assert seconds_until_all_ended(mark, ENDED) < ENDED


def test_a_rank_that_starts_after_its_launcher_has_ended_ends(tmp_path: Path) -> None:
    launched = {"TORCHELASTIC_RUN_ID": "run", "ECONMT_LAUNCHER": "1"}
    found = run_python("-c", RANK, "linux", env=launched, cwd=tmp_path, check=False)
    assert (found.returncode, found.stdout) == (1, "")


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_in_time(start: Callable[..., Run]) -> None:
    run = start("parallel.timeout=2")
    wait_for_rendezvous(run, lambda: len(run.ranks()) == 2)
    assert run.launcher.wait(2 + 2 * ENDED) == 1
    (line,) = run.said.splitlines()
    assert line.startswith(
        "econmt: error: rank 1 (never connected) does not answer, after update 0; all ranks stop"
    )
    assert not processes_of_run(run.mark)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_a_signal_saves_and_ends_all(
    start: Callable[..., Run], number: signal.Signals, name: str, whom: str
) -> None:
    run = start()
    run.wait_until_it_trains()
    os.kill(run.launcher.pid if whom == "launcher" else run.ranks()[1], number)
    assert run.launcher.wait(PATIENCE) == 128 + number
    assert not processes_of_run(run.mark)
    (line,) = [each for each in run.said.splitlines() if each.startswith("econmt: ")]
    assert line.startswith(f"econmt: {name}: saved at update ")
    assert f"saved at update {run.folder.commits()[-1].update} in " in line
