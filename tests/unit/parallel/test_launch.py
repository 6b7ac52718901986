"""What the one who starts ranks does when they end, or do not."""

from __future__ import annotations

import signal
import sys

import pytest

from econmt.parallel import launch
from econmt.parallel.launch import _Attempt
from econmt.parallel.processes import LEFT

SLEEPS = "import os, sys, time\nif os.environ['RANK'] == '{}': time.sleep(600)\nsys.exit({})"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_LOOK", 0.05)
    monkeypatch.setattr(launch, "_ENDING", 0.3)
    monkeypatch.setattr(launch, "_GRACE", 0.3)


def wait_for(code: str, left: int | None = None) -> tuple[int, bool]:
    attempt = _Attempt([], 2, 0)
    attempt._command = [sys.executable, "-S", "-c", code]
    if left is not None:
        attempt._keys.set(f"{LEFT}/{left}", "1")
    try:
        attempt.start()
        return attempt.wait()
    finally:
        attempt.end()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("rank", "left"), [(1, None), (0, 0)], ids=["others are done", "it is done"])
def test_a_rank_that_does_not_end_is_killed_in_one_line(
    capfd: pytest.CaptureFixture[str], rank: int, left: int | None
) -> None:
    assert wait_for(SLEEPS.format(rank, 0), left) == (0, False)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"econmt: rank {rank} (")
    assert "did not end within 0 s after the run was done: it is killed, and nothing is lost" in said


@pytest.mark.usefixtures("soon")
def test_rank_0_may_take_its_time_with_the_results(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os, time\nif os.environ['RANK'] == '0': time.sleep(1)"
    assert wait_for(code) == (0, False)
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("soon")
def test_a_rank_that_was_killed_is_named_and_the_others_are_ended(capfd: pytest.CaptureFixture[str]) -> None:
    code = f"import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), {int(signal.SIGKILL)})\ntime.sleep(600)"
    assert wait_for(code) == (1, True)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("econmt: error: rank 1 (")
    assert "was killed by SIGKILL; all ranks leave" in said
