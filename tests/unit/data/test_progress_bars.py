"""Bars pass everything on and show themselves only where someone is looking."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest

from econmt.data import progress_bars
from econmt.data.progress_bars import Heartbeat, counted, counting, download_bar, status_line


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
