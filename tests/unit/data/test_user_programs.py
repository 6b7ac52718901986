"""Programs of the user end with whoever has started them; bars show themselves where someone is looking."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from econmt.config import limits
from econmt.data import progress_bars, user_programs
from econmt.data.progress_bars import Heartbeat, counted, counting, download_bar, status_line
from econmt.data.user_programs import ProgramError, program_words, start_program
from tests.conftest import PATIENCE, econmt_environment

STARTER = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # with nohup it is ignored
from econmt.data.user_programs import start_program
with start_program(["sh", "-c", sys.argv[1]], ["a"]) as program:
    for _ in program.output():
        print("started", flush=True)
"""


def run(code: str, lines: list[str], **more: bool) -> tuple[list[bytes], int, str]:
    """Returns the lines that a shell's program writes, its exit code, and its last complaint."""
    with start_program(["sh", "-c", code], lines, **more) as program:
        return list(program.output()), program.code, program.complaint


@pytest.mark.parametrize(
    ("speed", "shown"), [(None, ""), (9.96, "10.0/s"), (10.0, "10/s"), (1234.5, "1,234/s")]
)
def test_rates_have_as_many_digits_as_they_need(speed: float | None, shown: str) -> None:
    task: Any = SimpleNamespace(finished_speed=None, speed=speed)
    assert progress_bars._Rate().render(task) == shown


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Callable[[], bool]]:
    """A pipe with a name, ``$HELD``; returns a function that waits until no process holds it open."""
    os.mkfifo(tmp_path / "held")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELD", str(tmp_path / "held"))
        descriptor = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
        os.close(os.open(tmp_path / "held", os.O_WRONLY))  # without any writer so far there is no end to read

        def released() -> bool:
            """Returns False if it is still held."""
            while select.select([descriptor], [], [], PATIENCE)[0]:
                if not os.read(descriptor, 100):
                    return True
            return False

        yield released
        os.close(descriptor)


def test_lines_go_in_and_out() -> None:
    assert run("cat; printf last; exit 3", ["a", "", "ü"]) == ([b"a", b"", "ü".encode(), b"last"], 3, "")
    assert run("exec >&- 2>&-; exit 5", [], keep_errors=True)[1] == 5, "output may end before the program"
    assert run("kill -USR1 $$", []) == ([], -signal.SIGUSR1, "")
    assert run("echo no; echo first >&2; echo ' bad ' >&2; echo >&2", [], keep_errors=True)[2] == "bad"
    assert run(
        "printf 'one ' | tee /dev/stderr; sleep 0.3; echo two | tee /dev/stderr", [], keep_errors=True
    ) == (*([b"one two"], 0, "one two"),)
    # SIGPIPE ends them, which Python ignores for itself; a signal to their whole group does not hide how they end.
    assert run("yes | head -n 1; trap '' TERM; kill 0; exit 4", []) == ([b"y"], 4, "")
    assert run("kill -KILL $PPID; sleep 1000", []) == ([], -signal.SIGKILL, ""), "a killed supervisor is told"


def test_a_program_that_cannot_be_started_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script"
    script.write_bytes(b"\x7fELF")
    script.chmod(0o755)
    assert program_words("--command", f"{script} 'a b'") == [str(script), "a b"]
    exec_format = pytest.raises(ProgramError, match=r"^cannot be started: Exec")
    with start_program([str(script)], []) as program, exec_format:
        list(program.output())

    def none(*_: object, **__: object) -> None:
        raise OSError(11, "no more processes")

    monkeypatch.setattr(user_programs.subprocess, "Popen", none)
    before = len([*Path("/dev/fd").iterdir()])
    with pytest.raises(ProgramError, match="cannot be started: no more processes"):
        run("cat", [])
    assert len([*Path("/dev/fd").iterdir()]) <= before, "no descriptor stays open"


def test_endless_output_is_ended(monkeypatch: pytest.MonkeyPatch, held: Callable[[], bool]) -> None:
    monkeypatch.setattr(limits, "LINE_BYTES", 100_000)
    with pytest.raises(ProgramError, match=r"^wrote more than 100,064 bytes for 4$"):
        run("exec 3>$HELD; yes", ["abc"])
    assert held(), "the program has ended"
    assert len(run("yes | head -c 100064", ["abc"])[0]) == 50_032
    with pytest.raises(ProgramError, match=r"^wrote a line of 1[0-9]{2},[0-9]{3} bytes or more$"):
        run("yes | tr -d '\\n'", ["abc" * 100_000])
    writes = "yes | head -c 99999; yes | head -c 9999998 >&2; echo end >&2"
    lines, code, said = run(writes, [], keep_errors=True)
    assert (len(b"\n".join(lines)), code, said) == (99_999, 0, "end")


def test_nothing_left_running_is_waited_for_and_all_stops(held: Callable[[], bool]) -> None:
    """Another process holds its standard output and error."""
    assert run("sleep 1000 3>$HELD & echo a", [], keep_errors=True) == ([b"a"], 0, "")
    assert held(), "what the program has started ends with it"
    with start_program(["sh", "-c", "echo $HELD $TOLD $PATH"], [], {"HELD": "a", "TOLD": "b"}) as program:
        expected = f"a b {os.environ['PATH']}".encode()
        assert list(program.output()) == [expected], "what is given goes before the process's own"
    (line,), _, _ = run("grep SigIgn /proc/self/status", [])
    ignored = int(line.split()[1], 16)
    assert not any(ignored >> number - 1 & 1 for number in (signal.SIGPIPE, signal.SIGXFSZ))


def test_a_program_is_stopped_on_request(held: Callable[[], bool]) -> None:
    sleeps = ["sh", "-c", "exec 3>$HELD; sleep 1000"]
    with pytest.raises(InterruptedError), start_program(sleeps, []) as program:
        list(program.output(lambda: True))
    assert held()


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_no_program_outlives_the_process_that_has_started_it(number: str, held: Callable[[], bool]) -> None:
    """Nor do programs that it has started in turn."""
    command = [sys.executable, "-c", STARTER, "exec 3>$HELD; sleep 1000 & echo; sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=econmt_environment()) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"started\n"
        starter.send_signal(signal.Signals[number])
    assert held()


def in_a_bar(items: Iterable[int], show: bool) -> list[int]:
    with counting("reading", None, "pairs", show=show) as more:
        return list(counted(items, more))


@pytest.mark.parametrize("show", [True, False])
def test_silent_without_a_terminal(show: bool, capfd: pytest.CaptureFixture[str]) -> None:
    assert in_a_bar(range(2500), show) == list(range(2500))
    with download_bar("file", 100, show=show) as arrived:
        arrived(60)
    assert capfd.readouterr() == ("", "")


def test_counts_are_told_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(Heartbeat, "say", lambda _, text: told.append(text))
    with counting("filtering the text", None, "pairs read") as more:
        more(1000)
        more(500)
    with counting("translating", 10, "lines") as more:
        more(4)
    assert told == [
        "filtering the text",
        "filtering the text: 1,000 pairs read",
        "filtering the text: 1,500 pairs read",
        "translating",
        "translating: 4 of 10 lines",
    ]


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # how rich is counted to take a pipe for a terminal
    assert in_a_bar(range(2500), True) == list(range(2500))
    with download_bar("file.gz", None, show=True) as arrived:
        arrived(60)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "reading" in captured.err
    assert "file.gz" in captured.err


def test_what_is_raised_in_the_text_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")

    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("line 2")

    with pytest.raises(ValueError, match="line 2"):
        in_a_bar(broken(), True)


def test_counts_of_a_total_with_the_rate(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with counting("translating", 29_000, "lines") as done:
        done(29_000)
    with status_line() as say:
        say("bucket 3 of 12: [2 x 3]\x1b[2J")
    counted = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capfd.readouterr().err)
    assert "29,000 of 29,000 lines" in counted
    assert "bucket 3 of 12: [2 x 3]\\x1b[2J" in counted
    assert max(map(len, re.split("[\r\n]", counted))) <= 80


def test_results_that_are_printed_meanwhile_go_where_they_belong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with counting("translating", None, "lines") as done:
        print("ein Hund")
        done(1)
    assert capsys.readouterr().out == "ein Hund\n"


def test_a_heartbeat_speaks_only_after_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = 0.0, list[str]()
    monkeypatch.setattr(progress_bars.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress_bars, "notice", told.append)
    heartbeat = Heartbeat(30.0)
    heartbeat.say("validation")
    waits: list[float] = []

    def once(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) % 2 == 0

    monkeypatch.setattr(heartbeat._finished, "wait", once)
    moments = ((29.0, 0), (30.0, 1), (61.0, 1), (89.0, 1), (91.0, 2), (210.0, 2), (211.0, 3))
    for now, count in moments:  # noqa: B007  the clock reads it
        heartbeat._beat()
        assert len(told) == count
    heartbeat.spoke()
    now = 240.0
    heartbeat._beat()
    heartbeat.say("translation")
    heartbeat._beat()
    assert len(told) == 3
    now = 241.0
    heartbeat._beat()
    assert told == ["validation"] * 3 + ["translation"]
    assert waits[:2] == [1.0, 1.0]
