"""Bars pass everything on and show themselves only where someone is looking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from econmt.data.progress_bars import counted, download_bar


@pytest.mark.parametrize("show", [True, False])
def test_silent_without_a_terminal(show: bool, capfd: pytest.CaptureFixture[str]) -> None:
    assert list(counted("reading", range(2500), show=show)) == list(range(2500))
    with download_bar("file", 100, show=show) as arrived:
        arrived(60)
    assert capfd.readouterr() == ("", "")


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # how rich is told to take a pipe for a terminal
    assert list(counted("reading", range(2500), show=True)) == list(range(2500))
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
        list(counted("reading", broken(), show=True))
