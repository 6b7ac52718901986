"""Shards, which are translated once and whole, and the student's text that is selected from them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sacrebleu.metrics.bleu import BLEU

from econmt.errors import InputError
from econmt_distill import selection
from econmt_distill.nearest import Candidates, choose, nearest
from econmt_distill.opening import open_teacher
from econmt_distill.selection import make_text
from econmt_distill.shards import Shards, _Estimate, duration
from econmt_distill.teachers import TeacherChoice
from tests.conftest import PATIENCE, econmt_environment
from tests.unit.distillation.conftest import calls


@pytest.fixture(autouse=True)
def _two_lines_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_CHUNK", 2)


LISTS = [
    ("a dog runs", ["ein Hund", "ein Hund rennt schnell", "der Hund rennt schnell los"]),
    ("", [""]),
    ("two cats", ["zwei Katzen", "zwei Kater", "zwei Katzen"]),
]


class FakeShards:
    """Translations of three lines, of a teacher whose training text has lines of up to ``most`` characters."""

    digest, lines = "0123456789abcdef", 3

    def __init__(self, lists: list[tuple[str, list[str]]], most: int) -> None:
        self._lists = lists
        self.teacher = SimpleNamespace(longer_than_training=lambda: lambda *pair: max(map(len, pair)) > most)

    def __iter__(self) -> Iterator[tuple[str, list[str]]]:
        return iter(self._lists)


def made(folder: Path, references: Path | None = None, **more: Any) -> Any:
    shards: Any = FakeShards(more.get("lists", LISTS), more.get("most", 100))
    languages, trained = ("en", "de"), more.get("trained")
    return make_text(folder / "text", shards, languages, references, trained, 2, lambda _: None)


def test_the_first_translations_are_taken_without_references(tmp_path: Path) -> None:
    text = made(tmp_path)
    assert (tmp_path / "text/train.en").read_text() == "a dog runs\n\ntwo cats\n"
    assert (tmp_path / "text/train.de").read_text() == "ein Hund\n\nzwei Katzen\n"
    assert text.prefix == tmp_path / "text/train"
    assert (text.statistics.pairs, text.statistics.chosen) == (3, 0)
    assert text.statistics.ratio == (8 + 0 + 11) / (10 + 0 + 8)


def test_the_closest_translations_are_taken(tmp_path: Path) -> None:
    references = tmp_path / "references.de"
    references.write_text("der Hund rennt schnell los\n\nzwei Kater\n")
    text = made(tmp_path, references)
    assert (tmp_path / "text/train.de").read_text() == "der Hund rennt schnell los\n\nzwei Kater\n"
    assert text.statistics.chosen == 2
    # The same text is not written again, other references are noticed.
    (tmp_path / "text/train.de").write_text("kept\n")
    made(tmp_path, references)
    assert (tmp_path / "text/train.de").read_text() == "kept\n"
    (tmp_path / "text/statistics.json").unlink()
    assert made(tmp_path, references).statistics.chosen == 2, "the text is made again"
    references.write_text("ein Hund\n\nzwei Kater\n")
    made(tmp_path, references)
    assert (tmp_path / "text/train.de").read_text() == "ein Hund\n\nzwei Kater\n"


def test_references_are_kept_where_the_teacher_fails(tmp_path: Path) -> None:
    """An empty translation, and a line or a reference longer than the teacher's training text."""
    references = tmp_path / "references.de"
    references.write_text("der Hund rennt schnell los, und los\n\nzwei Kater\n")
    lists = [*LISTS[:2], ("two cats", ["", ""])]
    text = made(tmp_path, references, lists=lists)
    assert (tmp_path / "text/train.de").read_text() == "der Hund rennt schnell los\n\nzwei Kater\n"
    assert (text.statistics.chosen, text.statistics.kept) == (1, 1)
    both = "los, und los", (0, 2)
    for most, first, counts in ((9, *both), (30, *both), (40, "los", (1, 1))):
        text = made(tmp_path / str(most), references, lists=lists, most=most)
        lines = (tmp_path / str(most) / "text/train.de").read_text().split("\n")
        assert lines[0] == f"der Hund rennt schnell {first}"
        assert (text.statistics.chosen, text.statistics.kept) == counts
    assert made(tmp_path / "alone", lists=lists, most=9).statistics.blank == 1, "of the sources"
    assert (tmp_path / "alone/text/train.de").read_text() == "ein Hund\n\n\n", "without references"


def test_nearest_is_by_sentence_bleu_and_the_first_of_equal_ones() -> None:
    lists = [[*texts] for _, texts in LISTS]
    references = ["ein Hund rennt", "", "zwei Katzen"]
    judge = BLEU(effective_order=True)
    expected = [
        max(range(len(texts)), key=lambda i: (judge.sentence_score(texts[i], [reference]).score, -i))
        for texts, reference in zip(lists, references, strict=True)
    ]
    assert nearest(lists, references, "13a") == expected
    assert expected[2] == 0


@pytest.mark.parametrize(("lines", "word"), [(2, "fewer"), (4, "more")])
def test_references_of_another_length_are_told(tmp_path: Path, lines: int, word: str) -> None:
    references = tmp_path / "references.de"
    references.write_text("x\n" * lines)
    with pytest.raises(InputError, match=rf"references.de: has {word} lines than the --source, 3; line n"):
        made(tmp_path, references)
    assert not (tmp_path / "text").exists()


def test_a_student_keeps_its_text_and_processes_its_order(tmp_path: Path) -> None:
    text = made(tmp_path)
    references = tmp_path / "references.de"
    references.write_text("x\n" * 3)
    message = r"model: is trained on text made from other inputs: --target .* was not given before; give"
    with pytest.raises(InputError, match=message):
        made(tmp_path, references, trained=text.inputs)
    assert (tmp_path / "text/train.de").read_text() == "ein Hund\n\nzwei Katzen\n"
    lists = [[*texts] for _, texts in LISTS]
    references = [["ein Hund rennt schnell", "", f"zwei Kater {number}"] for number in range(20)]
    chunks = [Candidates(["a", "b", "c"], lists, each) for each in references]
    several = list(choose(iter(chunks), "13a", 2))
    assert several == list(choose(iter(chunks), "13a", 1))
    assert [chunk for chunk, _ in several] == chunks
    assert {tuple(best) for _, best in several} == {(1, 0, 1)}


KILLED = """
import os, signal, sys
from econmt_distill.nearest import Candidates, choose
def chunks():
    chunk = Candidates(["a"], [["b", "c"]], ["b"])
    yield from [chunk] * 30
    import multiprocessing
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    list(choose(chunks(), "13a", 2))
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, tmp_path / "killed.py"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=econmt_environment(), **streams) as process:
        children = process.stdout.readline().split()
    assert len(children) == 2
    for child in children:
        try:
            descriptor = os.pidfd_open(int(child))
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], PATIENCE)[0], "it still runs"
        os.close(descriptor)


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
    again.path(2).unlink()
    (tmp_path / "program.py").write_text("raise SystemExit(3)")
    with pytest.raises(InputError, match=r"exit code 3 \(.*text.en:7 to 7\)"):
        again.translate(lambda _: None)


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
    told = r"shards: holds translations without inputs.json, .*; delete .*shards"
    with pytest.raises(InputError, match=told):
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
    code = "import sys; t = sys.stdin.read(); sys.exit('no d') if 'd' in t else print(t, end='')"
    made = Shards(tmp_path / "second", TeacherChoice(command=program(code)), source, 3)
    with pytest.raises(InputError, match=r"text.en:4 to 6\); it said: no d"):
        made.translate(lambda _: None)
    assert made.missing() == [1, 2]


def test_programs_that_cannot_teach_are_told(program: Callable[[str], str]) -> None:
    teacher = open_teacher(TeacherChoice(command=program("import sys\nfor _ in sys.stdin: print('OK')")))
    lines = [f"line {number}" for number in range(10)]
    with pytest.raises(InputError, match=r"wrote 'OK' for each of 12 lines, which differ \(q:1 to 13\)$"):
        teacher.translate([*lines, "", *lines[:2]], "q", 1, lambda _: None)
    assert teacher.translate(lines[:9] * 3, "q", 1, lambda _: None) == [["OK"]] * 27, "so may repeated lines"
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
    durations = [duration(seconds) for seconds in (7.4, 99.4, 99.5, 5969, 5970, 9000)]
    assert durations == ["7 s", "99 s", "2 min", "99 min", "1.7 h", "2.5 h"]
    estimate = _Estimate(1000, told.append)
    estimate.done(9)
    estimate.done(1)
    assert told == [
        "translating: 9 lines (1 a second) of 1,000",
        f"translating: 10 lines (0 a second) of 1,000, about {duration(1980)} left",
    ]
