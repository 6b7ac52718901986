from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.compare import run as command_line
from scripts.bench.compare.measure import FailedError, Finished, Mark, processor_seconds
from scripts.bench.compare.toolkit import Command, Places, Toolkit
from scripts.bench.compare.tools import TOOLKITS
from scripts.bench.compare.turns import (
    RunningClock,
    Trainee,
    continue_group,
    run_alone,
    stop_group,
    take_turns,
    train_in_turns,
)
from scripts.tests.conftest import Measured
from tests.conftest import PATIENCE

READING = TOOLKITS["plain"]().reading
# A toolkit of which each update has 100 target tokens; it writes down its process.
FAKE = """\
import os, sys, time
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
for update in range(1, 10**6):
    end = time.process_time() + 0.01
    while time.process_time() < end:
        pass
    print(f"update {update}: 100 target tokens", flush=True)
    if update == int(sys.argv[2]):
        sys.exit(int(sys.argv[3]))
"""


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self, _process: int = 0) -> float:
        return self.now


def fake_words(place: Path, ends_at: int = -1, status: int = 0) -> list[str]:
    return [sys.executable, "-S", "-c", FAKE, str(place), str(ends_at), str(status)]


def trainee(folder: Path, name: str, ends_at: int = -1, status: int = 0, **how: Any) -> Trainee:
    return Trainee(fake_words(folder / name, ends_at, status), {}, folder, READING, warm_up=2, **how)


def state(process: int) -> str:
    """The kernel's letter for a process: T stopped, Z ended and not yet waited for; gone if there is none."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except OSError:
        return "gone"
    return text.rpartition(")")[2].split()[0]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_dead(process: int) -> bool:
    return state(process) in ("gone", "Z")


def test_a_running_clock_stands_still_while_its_group_is_stopped() -> None:
    now = Clock()
    clock = RunningClock(now)
    assert clock.read() == 0.0
    clock.go()
    now.now += 3.0
    assert clock.read() == 3.0
    clock.halt()
    now.now += 50.0
    assert clock.read() == 3.0
    clock.go()
    now.now += 2.0
    clock.halt()
    assert clock.read() == 5.0


def test_stopped_time_does_not_count_and_late_lines_are_of_the_last_running_moment(tmp_path: Path) -> None:
    now = Clock()
    one = Trainee(["unused"], {}, tmp_path, READING, warm_up=20, clock=now)
    one.clock.go()
    for update in (10, 20):
        now.now += 4.0
        one.hear(f"update {update}: 999 target tokens")
    one.clock.halt()
    now.now += 60.0
    one.hear("loading")
    one.clock.go()
    now.now += 3.0
    one.clock.halt()
    now.now += 60.0
    one.hear("update 30: 600 target tokens")  # printed at the end of its turn, read long after
    one.clock.go()
    now.now += 2.0
    one.hear("update 40: 300 target tokens")
    assert one.marks() == [Mark(0, 0.0, 0.0), Mark(10, 3.0, 600.0), Mark(20, 5.0, 900.0)]
    assert one.wants_turns(5.1)
    assert not one.wants_turns(5.0)
    finished = one.result()
    assert isinstance(finished, Finished)
    assert finished.window == (20, 5.0, 180.0)


class Scripted(Trainee):
    """Trains at a known speed on a clock that only moves while somebody waits; notes who runs when."""

    def __init__(
        self, name: str, now: Clock, notes: list[str], tokens_per_second: float, stretch: float
    ) -> None:
        super().__init__([name], {}, Path(), READING, warm_up=0, clock=now)
        self.name, self.now, self.notes = name, now, notes
        self.speed, self.stretch, self.line = tokens_per_second, stretch, 1
        self.hear("update 0: 0 target tokens")

    def resume(self) -> None:
        self.notes.append(f"{self.name} goes")
        self.clock.go()

    def halt(self) -> None:
        self.notes.append(f"{self.name} stands")
        self.clock.halt()

    def wait(self, seconds: float, *, until_warm: bool = False) -> None:
        began = self.clock.read()
        while self.line * self.stretch <= began + seconds:
            self.now.now += self.line * self.stretch - self.clock.read()
            self.hear(f"update {10 * self.line}: {self.speed * self.stretch:.0f} target tokens")
            self.line += 1
        self.now.now += began + seconds - self.clock.read()


def test_turns_go_round_until_the_last_has_its_window_and_only_one_runs() -> None:
    now, notes = Clock(), list[str]()
    quick, slow = Scripted("quick", now, notes, 1000.0, 1.0), Scripted("slow", now, notes, 200.0, 8.0)
    take_turns([quick, slow], seconds=10.0, turn=2.0, limit=1000.0)
    cycle = ["quick goes", "quick stands", "slow goes", "slow stands"]
    assert notes == cycle * 8  # the line of ten seconds comes after sixteen
    assert quick.clock.read() == slow.clock.read() == pytest.approx(16.0)
    results = [one.result() for one in (quick, slow)]
    assert all(isinstance(result, Finished) for result in results)
    windows = [result.window for result in results if isinstance(result, Finished)]
    assert [window.tokens_per_second for window in windows if window] == pytest.approx([1000.0, 200.0])
    now, notes = Clock(), list[str]()
    mute, quick = Scripted("mute", now, notes, 1.0, 1e9), Scripted("quick", now, notes, 1000.0, 1.0)
    take_turns([mute, quick], seconds=10.0, turn=2.0, limit=30.0)
    assert isinstance(mute.result(), FailedError)
    assert "took over 30 s" in str(mute.result())
    assert isinstance(quick.result(), Finished)


def test_a_group_is_stopped_and_continued(tmp_path: Path) -> None:
    with subprocess.Popen(
        fake_words(tmp_path / "one"), stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            until((tmp_path / "one").exists)
            stop_group(process.pid)
            assert state(process.pid) == "T"
            continue_group(process.pid)
            until(lambda: state(process.pid) in "RS")
        finally:
            process.kill()
    stop_group(process.pid)  # of what is gone: nothing
    continue_group(process.pid)


def test_processes_train_in_turns_and_end(tmp_path: Path) -> None:
    began = time.monotonic()
    results = train_in_turns({name: trainee(tmp_path, name) for name in "abc"}, seconds=0.2, turn=0.06)
    elapsed = time.monotonic() - began
    assert list(results) == ["a", "b", "c"]
    total = 0.0
    for name, result in results.items():
        assert isinstance(result, Finished)
        assert result.window is not None
        assert result.window.seconds >= 0.2
        assert result.window.tokens_per_second * result.window.seconds == pytest.approx(
            100.0 * result.window.updates
        )
        assert result.marks[-1].updates == result.window.updates
        assert result.peak_bytes >= 0
        assert f"update {result.window.updates}: 100 target tokens" in result.lines
        assert is_dead(int((tmp_path / name).read_text()))
        total += result.window.seconds
    # Only one ran at a time: with the time of the others each would have nearly all of it.
    assert total < elapsed


def test_one_that_fails_tells_why_and_the_others_go_on(tmp_path: Path) -> None:
    ends = {"early": (1, 3), "late": (5, 4), "whole": (-1, 0), "short": (6, 0)}
    # Seconds of processors: the updates of a second do not depend on what else the machine does.
    trainees = {name: trainee(tmp_path, name, *each, clock=processor_seconds) for name, each in ends.items()}
    results = train_in_turns(trainees, seconds=1.0, turn=0.06)
    assert "ended with status 3" in str(results["early"])
    assert "ended with status 4" in str(results["late"])
    assert "update 5: 100 target tokens" in str(results["late"])
    whole, short = results["whole"], results["short"]
    assert isinstance(whole, Finished)
    assert whole.window is not None
    assert isinstance(short, Finished)  # it came to its own end, and what it told counts
    assert short.window is not None
    assert short.window.updates == 4
    assert all(is_dead(int((tmp_path / name).read_text())) for name in trainees)


def test_a_trainee_by_itself(tmp_path: Path) -> None:
    """It has no window of turns; its first failure counts; no memory is read while it stands."""
    finished = run_alone(trainee(tmp_path, "whole", ends_at=6))
    assert isinstance(finished, Finished)
    assert (finished.marks, finished.window and finished.window.updates) == ((), 4)
    late, stopped = trainee(tmp_path, "late", ends_at=1, status=3), trainee(tmp_path, "stopped")
    late.start()
    until(lambda: late.ended)
    late.fail("took too long")
    assert "took too long" in str(late.result())
    stopped.start()
    for change, paused in ((stopped.halt, True), (stopped.resume, False)):
        change()
        assert stopped._watch is not None
        assert stopped._watch.paused is paused
    stopped.close()


def test_all_are_killed_if_anything_raises(tmp_path: Path) -> None:
    class Broken(Trainee):
        def resume(self) -> None:
            raise KeyboardInterrupt

    broken = Broken(fake_words(tmp_path / "b"), {}, tmp_path, READING, warm_up=2)
    with pytest.raises(KeyboardInterrupt):
        train_in_turns({"a": trainee(tmp_path, "a"), "b": broken}, seconds=9.0, turn=0.01)
    assert all(is_dead(int((tmp_path / name).read_text())) for name in "ab")


class FakeToolkit(Toolkit):
    """The program above as a toolkit of the comparison."""

    package = "fake"
    translated = re.compile(r"took ([\d.]+) s")

    @property
    def requirements(self) -> Path | None:
        return None

    def version(self) -> str:
        return "1"

    def train(self, places: Places, model: Path, updates: int) -> Command:
        return Command(fake_words(places.work / "process", min(updates, 10**6)))

    def translate(self, places: Places, model: Path, output: Path) -> Command:
        program = "import sys; open(sys.argv[1], 'w').write('Ein Mann\\n' * 200); print('took 0.5 s')"
        return Command([sys.executable, "-S", "-c", program, str(output)])


@pytest.mark.parametrize("clock", [(), pytest.param(("--processor-time",), marks=pytest.mark.slow)])
def test_the_command_measures_in_turns(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: tuple[str, ...]
) -> None:
    kept = signal.getsignal(signal.SIGTERM)
    toolkits = {name: type(name, (FakeToolkit,), {"name": name}) for name in "ab"}
    monkeypatch.setattr(command_line, "TOOLKITS", toolkits)
    monkeypatch.setattr(command_line, "make_data", lambda *_: {"test_pairs": 200})
    words = ("--work", tmp_path, "--seconds", "0.1", "--warm-up", "2", "--checkpoint-updates", "40")
    try:
        rows = measured("compare.run", *words, *clock, "--turn", "0.05", "--translations", "2")
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert [row["toolkit"] for row in rows] == ["a", "b"]
    for row in rows:
        assert row["sentences, s"] == "0.50"
        assert row["words out"] == 400
        assert row["target tokens/s"] > 0
        assert " of " in row["to the fastest peer"]
        assert (tmp_path / row["toolkit"] / "train.log").read_text().startswith("update 1: 100 ")
