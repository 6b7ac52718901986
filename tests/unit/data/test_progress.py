"""Bars pass everything on and show themselves only where someone is looking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from econmt.data.progress import Progress


@pytest.mark.parametrize("show", [True, False])
def test_silent_without_a_terminal(show: bool, capfd: pytest.CaptureFixture[str]) -> None:
    assert list(Progress(show).count("reading", range(2500))) == list(range(2500))
    bar = Progress(show).download("file", 100)
    bar.advance(60)
    bar.close()
    assert capfd.readouterr() == ("", "")


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # how rich is told to take a pipe for a terminal
    progress = Progress(show=True)
    assert list(progress.count("reading", range(2500))) == list(range(2500))
    bar = progress.download("file.gz", None)
    bar.advance(60)
    bar.close()
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
        list(Progress(show=True).count("reading", broken()))
