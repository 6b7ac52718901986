"""Speed of a model: which lines are translated when, and which seconds count."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from econmt.errors import EconmtError
from econmt_distill import timing
from econmt_distill.teachers import TeacherChoice
from econmt_distill.timing import TimedTranslations


def run(monkeypatch: pytest.MonkeyPatch, lines: list[str], seconds: list[float]) -> list[list[str]]:
    """Runs the process that measures in this one; returns the lines of each call of the model."""
    calls: list[list[str]] = []

    def translate(given: list[str]) -> list[str]:
        calls.append(given)
        return [f"{len(calls)} {line}" for line in given]

    clock = iter(seconds)
    monkeypatch.setattr(timing, "_translator", lambda task: translate)
    monkeypatch.setattr(timing, "_processor_seconds", lambda: next(clock))
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"runtime": "r", "lines": lines})))
    assert timing._main() == 0
    return calls


def test_the_faster_of_two_passes_counts_after_a_warm_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [str(number) for number in range(40)]
    for seconds, best in (([1.0, 5.0, 10.0, 13.0], 3.0), ([1.0, 3.0, 10.0, 14.5], 2.0)):
        assert run(monkeypatch, lines, seconds) == [lines[:32], lines, lines]
        told = json.loads(capsys.readouterr().out)
        assert told == {"texts": [f"3 {line}" for line in lines], "seconds": best}
        assert TimedTranslations(**told).words_per_second == 80 / best


def test_processor_time_includes_that_of_ended_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    times = type("Times", (), {"children_user": 3.0, "children_system": 0.25})
    monkeypatch.setattr("os.times", lambda: times)
    monkeypatch.setattr("time.process_time", lambda: 10.0)
    assert timing._processor_seconds() == 13.25


def test_a_measuring_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    says = "cat > /dev/null; echo a >&2; echo ' the reason ' >&2; exit 1"
    missing = "the process that measures cannot be started: No"
    for command, model, problem in (
        (["sh", "-c", says], Path("model"), "model: cannot be timed: the reason$"),
        (["sh", "-c", "exit 5"], TeacherChoice(command="cat"), "cat: cannot be timed: exit code 5$"),
        (["no-such-program"], Path("model"), f"model: cannot be timed: {missing}"),
    ):
        monkeypatch.setattr(timing, "_COMMAND", command)
        with pytest.raises(EconmtError, match=f"^{problem}"):
            timing.timed(model, ["a"])


def test_the_measuring_process_gets_one_thread_and_its_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A command that writes what it gets, and a result with its environment as texts."""
    names = "$OMP_NUM_THREADS", "$OPENBLAS_NUM_THREADS", "$MKL_NUM_THREADS"
    texts = json.dumps([*names]).replace('"', '\\"')
    script = f'cat > {tmp_path}/task; printf %s "{{\\"texts\\": {texts}, \\"seconds\\": 2.5}}"'
    monkeypatch.setattr(timing, "_COMMAND", ["sh", "-c", script])
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    choice = TeacherChoice(folder=tmp_path / "teacher", device="cuda", threads=7, beam_size=3)
    assert timing.timed(choice, ["a", "ü"]) == (["1", "1", "1"], 2.5)
    task = json.loads((tmp_path / "task").read_text())
    assert task["lines"] == ["a", "ü"]
    wanted = {"folder": str(tmp_path / "teacher"), "device": "cpu", "threads": 1, "beam_size": 3}
    assert {name: task["teacher"][name] for name in wanted} == wanted
    timing.timed(tmp_path / "runtime", [])
    assert json.loads((tmp_path / "task").read_text()) == {"runtime": str(tmp_path / "runtime"), "lines": []}
