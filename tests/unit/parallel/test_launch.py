"""How the launcher treats ranks that end, stay, or are killed, with programs of one line as ranks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from econmt.parallel import launch
from tests.conftest import run_python

BEGIN = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"


Launch = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Launches two ranks that run some code; returns the exit code."""

    def start(code: str, restarts: int = 0, *words: str, grace: float = 0.3) -> int:
        monkeypatch.setattr(launch, "_COMMAND", ("-S", "-c", BEGIN + code))
        monkeypatch.setattr(launch, "_GRACE", grace)
        return launch.launch(words, 2, restarts)

    # What it sets goes when the test ends.
    for name in ("ECONMT_LAUNCHER", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "")
    return start


@pytest.mark.slow
def test_one_process_does_not_import_the_elastic_agent() -> None:
    code = "import sys, econmt.cli.train; print([name for name in sys.modules if 'elastic' in name])"
    assert run_python("-c", code).stdout == "[]\n"


def test_a_rank_that_was_killed_is_named_and_the_others_are_ended(
    run: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("if rank: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)") == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("econmt: error: rank 1 (")
    assert "was killed by SIGKILL; all ranks stop" in said


def test_all_start_again_when_one_was_lost(run: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    again = "if rank and os.environ['TORCHELASTIC_RESTART_COUNT'] < '2': os.kill(os.getpid(), signal.SIGKILL)"
    assert run(again, 3) == 0
    lines = capfd.readouterr().err.splitlines()
    assert [line.rpartition(" (")[2] for line in lines[1::2]] == ["1 of 3)", "2 of 3)"]
    assert all("was killed by SIGKILL" in line for line in lines[::2])
    assert len(lines) == 4


def test_errors_results_and_words_of_ranks(run: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("sys.stderr.write(f'{rank} ')\nsys.exit(2)", 3, grace=60.0) == 2
    assert sorted(capfd.readouterr().err.split()) == ["0", "1"]
    assert run("if rank == 0: time.sleep(0.2)") == 0
    assert capfd.readouterr().err == ""
    words = ("output=a$$b", "${local_rank}", "$x")
    assert run("print(sys.argv[1:]) if rank else None", 0, *words) == 0
    assert capfd.readouterr().out.strip() == str(list(words))


def test_a_signal_while_ranks_are_started_is_the_exit_code_and_leaves_its_handler(
    run: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(agent: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SignalException("interrupted", signal.SIGTERM)

    monkeypatch.setattr(launch._Agent, "run", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert run("") == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_that_end_on_a_signal_have_time_to_save(run: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
def leave(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one would end it
    if rank == 0:
        time.sleep(0.5)  # the other has left already
        print("saved", flush=True)
    os._exit(143)
signal.signal(signal.SIGTERM, leave)
if rank == 0:
    time.sleep(0.5)
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(600)
"""
    assert run(code, 3, grace=60.0) == 143
    assert capfd.readouterr().out == "saved\n"


def test_signals_before_ranks_can_save_and_after(run: Launch) -> None:
    assert run("os.kill(os.getppid(), signal.SIGTERM) if rank else None\ntime.sleep(600)", 3) == 143
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run("if rank: os.kill(os.getppid(), signal.SIGHUP)") == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_other_host_reaches_the_store(run: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
if rank:
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    lines = open('/proc/net/tcp').readlines()[1:] + open('/proc/net/tcp6').readlines()[1:]
    sockets = [line.split() for line in lines]
    print(*(each[1] for each in sockets if each[1].endswith(port) and each[3] == '0A'))
"""
    assert run(code) == 0
    address, _, _ = capfd.readouterr().out.strip().partition(":")
    assert address == "0100007F", "127.0.0.1 in the kernel's order of bytes, and no other"
