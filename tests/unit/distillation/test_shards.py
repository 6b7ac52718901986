"""Shards are translated once, whole, and by the teacher that the folder began with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from econmt.errors import InputError
from econmt_distill.opening import open_teacher
from econmt_distill.shards import Shards, _Estimate, duration
from econmt_distill.teachers import TeacherChoice
from tests.unit.distillation.conftest import calls

LINES = ["a b", "", "c", "d e f", "  ", "g", "h"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text.en"
    path.write_text("".join(f"{line}\n" for line in LINES))
    return path


def shards(folder: Path, teacher: TeacherChoice, size: int | None = 3) -> Shards:
    return Shards(folder / "shards", teacher, folder / "text.en", size)


def test_all_lines_are_translated_in_their_order(
    source: Path, teacher: TeacherChoice, tmp_path: Path
) -> None:
    said: list[str] = []
    made = shards(tmp_path, teacher)
    made.translate(said.append)
    assert list(made) == [(line, [line.upper().strip()]) for line in LINES]
    assert calls(tmp_path) == [2, 2, 1], "blank lines are not given to the program"
    assert said[0].startswith("loading ")
    names = {"00000.txt", "00001.txt", "00002.txt", "inputs.json"}
    assert {path.name for path in made.folder.iterdir()} == names


def test_only_missing_and_damaged_shards_are_translated(
    source: Path, teacher: TeacherChoice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = shards(tmp_path, teacher)
    made.translate(lambda _: None)
    made.path(0).write_text("A B\n")  # cut
    made.path(2).unlink()
    again = shards(tmp_path, teacher, None)
    assert again.size == 3, "as the folder began"
    assert again.missing() == [0, 2]
    again.translate(lambda _: None)
    assert calls(tmp_path) == [2, 2, 1, 2, 1]
    assert [best for _, (best,) in again] == [line.upper().strip() for line in LINES]
    assert "1 of 3 shards are complete and are kept" in capsys.readouterr().err
    again.translate(lambda _: None)
    assert len(calls(tmp_path)) == 5


def test_other_inputs_are_named(source: Path, teacher: TeacherChoice, tmp_path: Path) -> None:
    shards(tmp_path, teacher).translate(lambda _: None)
    moved, cat = source.rename(tmp_path / "moved.en"), replace(teacher, command="cat")
    assert Shards(tmp_path / "shards", teacher, moved, None).missing() == []
    source.write_text(moved.read_text())
    assert shards(tmp_path, teacher, None).missing() == []

    def refused(message: str, teacher: TeacherChoice, file: Path, size: int) -> None:
        with pytest.raises(InputError, match=message):
            Shards(tmp_path / "shards", teacher, file, size)

    remedy = "give the same, another --output, or delete .*shards"
    refused(f"--shard-lines 3 -> 2; {remedy}", teacher, source, 2)
    refused(r"other inputs: --command .*program.py -> cat; give", cat, source, 3)
    source.write_text(source.read_text().replace("c", "x"))
    refused(r"other inputs: --source .*text.en has changed; give", teacher, source, 3)
    refused(r"--source .*text.en -> .*other.en; give", teacher, source.rename(tmp_path / "other.en"), 3)
    (tmp_path / "none.en").write_text("")
    with pytest.raises(InputError, match=r"none.en: the file is empty"):
        Shards(tmp_path / "none", teacher, tmp_path / "none.en", 3)
    again = Shards(tmp_path / "shards", cat, moved, None, replace=True)
    assert again.missing() == [0, 1, 2], "other shards are replaced on request"


def test_shards_of_unknown_origin_are_not_taken(source: Path, teacher: TeacherChoice, tmp_path: Path) -> None:
    """As a deletion leaves them that was stopped."""
    made = shards(tmp_path, teacher)
    made.translate(lambda _: None)
    (made.folder / "inputs.json").unlink()
    other = replace(teacher, command="cat")
    with pytest.raises(
        InputError, match=r"shards: holds translations without inputs.json, .*; delete .*shards"
    ):
        shards(tmp_path, other)
    again = Shards(made.folder, other, source, None, replace=True)
    assert again.missing() == [0]
    (made.folder / "inputs.json").rename(made.folder / ".inputs.json.1.partial")
    assert shards(tmp_path, teacher).missing() == [0, 1, 2], "left by a process that was killed"


def test_a_program_that_fails_is_told(source: Path, program: Callable[[str], str], tmp_path: Path) -> None:
    place, each = r"\(.*text.en:1 to 3\)", "it must write one for each"
    for code, problem in (
        ("sys.exit('first\\nno such language\\n')", f"exit code 1 {place}; it said: no such"),
        ("print('one')", f"wrote 1 lines for 2; {each} {place}"),
        (
            "sys.stderr.write('hm'); sys.stderr.flush()\nwhile True: print('y')",
            f"wrote more than 2 lines; {each} {place}; it said: hm",
        ),
        ("sys.stdout.buffer.write(b'a\\n\\xff\\n')", r"text.en:1 to 3:2: not valid UTF-8"),
    ):
        made = Shards(
            tmp_path / str(len(code)), TeacherChoice(command=program(f"import sys; {code}")), source, 3
        )
        with pytest.raises(InputError, match=problem) as error:
            made.translate(lambda _: None)
        assert len(error.value.lines) == 1
        assert made.missing() == [0, 1, 2], "nothing is left of a shard that failed"


def test_a_program_that_does_not_exist_is_told() -> None:
    with pytest.raises(InputError, match="--command nosuchprogram x: no such program"):
        open_teacher(TeacherChoice(command="nosuchprogram x"))
    with pytest.raises(InputError, match="quote its arguments"):
        open_teacher(TeacherChoice(command="cat '"))


def test_lists_of_translations_are_read_back(source: Path, teacher: TeacherChoice, tmp_path: Path) -> None:
    several = replace(teacher, nbest_size=2)
    made = shards(tmp_path, several, 7)
    rows = [[line, f"{line}\u2028!"] for line in LINES]
    made.path(0).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert made.missing() == []
    assert list(made) == list(zip(LINES, rows, strict=True))
    made.path(0).write_text("[]\n" * 7)
    with pytest.raises(InputError, match=r"00000.jsonl:1: not a list of translations; delete the file"):
        list(made)


def test_the_time_left_is_told_when_a_hundredth_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 10.0, 10.0, 20.0, 20.0])
    clock = SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr("econmt_distill.shards.time", clock)
    told: list[str] = []
    durations = [duration(seconds) for seconds in (7.4, 99, 100, 5900, 9000)]
    assert durations == ["7 s", "99 s", "2 min", "98 min", "2.5 h"]
    estimate = _Estimate(1000, told.append)
    estimate.done(1)
    estimate.done(99)
    assert told == [
        "translating: 1 lines (0 a second) of 1,000",
        f"translating: 100 lines (5 a second) of 1,000, about {duration(180)} left",
    ]
