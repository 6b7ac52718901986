"""The soak: what counts as flat, and that a command is watched, fed and ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scripts import soak
from scripts.soak import Sample


def curve(*minutes: float) -> list[Sample]:
    """Samples of minutes with these means, in MB, and the beginning of one more."""
    return [
        Sample(60.0 * minute + second, int(megabytes * 1e6))
        for minute, megabytes in enumerate([*minutes, 1.0])
        for second in ((0.0, 30.0) if minute < len(minutes) else (0.0,))
    ]


def test_the_first_minutes_and_one_that_is_cut_short_do_not_count() -> None:
    assert soak.growth(curve(10.0, 100.0, 200.0, 202.0, 200.0)) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="soak for longer"):
        soak.growth(curve(1.0, 1.0, 1.0))


def test_what_grows_by_more_than_five_percent_is_not_flat() -> None:
    flat, line = soak.verdict("training", curve(0.0, 0.0, 200.0, 205.0, 209.0))
    assert flat
    assert line == "training: flat: 200 MB in minute 2, 209 MB in minute 4, minutes differ by at most 4.5 %"
    flat, line = soak.verdict("training", curve(0.0, 0.0, 200.0, 205.0, 211.0))
    assert not flat
    assert "GROWS" in line


@pytest.mark.thorough
def test_a_command_is_fed_watched_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SECONDS_BETWEEN", 0.05)
    seen, number = tmp_path / "seen", tmp_path / "number"
    program = (
        f"import os, sys; open({str(number)!r}, 'w').write(str(os.getpid()))\n"
        f"open({str(seen)!r}, 'w').write(sys.stdin.readline())\nfor line in sys.stdin: pass"
    )
    csv = tmp_path / "found.csv"
    samples = soak.run([sys.executable, "-S", "-c", program], 0.05, csv, b"a line\n")
    assert seen.read_text() == "a line\n"
    assert soak.read(csv) == samples
    assert samples[-1].resident > 1e6
    started = int(number.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(started, 0)


@pytest.mark.slow
def test_a_command_that_ends_early_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = soak.main(
        ["run", "--minutes", "1", "--csv", str(tmp_path / "x.csv"), "--", sys.executable, "-c", "pass"]
    )
    # It may be gone before the first look, or at the next.
    assert code == 2
    assert "ended after" in capsys.readouterr().err


def test_curves_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "growing.csv", tmp_path / "soak.png"
    for name, last in (("flat", 1.0), ("growing", 2.0)):
        rows = [f"{sample.seconds},{sample.resident}" for sample in curve(1.0, 1.0, 1.0, last)]
        path.with_stem(name).write_text("\n".join(["seconds,resident_bytes", *rows]) + "\n")
    files = [str(path.with_stem("flat")), str(path)]
    assert soak.main(["draw", *files, "--picture", str(picture)]) == 1
    assert soak.main(["draw", files[0], "--picture", str(picture)]) == 0
    assert picture.stat().st_size > 1000
    assert "growing: GROWS" in capsys.readouterr().out
