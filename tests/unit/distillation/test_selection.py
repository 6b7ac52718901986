"""The student's text: the teacher's first translations, or those that are closest to references."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sacrebleu.metrics.bleu import BLEU

from econmt.errors import InputError
from econmt_distill.nearest import Candidates, choose, nearest
from econmt_distill.selection import make_text
from tests.conftest import econmt_environment

LISTS = [
    ("a dog runs", ["ein Hund", "ein Hund rennt schnell", "der Hund rennt schnell los"]),
    ("", [""]),
    ("two cats", ["zwei Katzen", "zwei Kater", "zwei Katzen"]),
]


class FakeTeacher:
    """Teacher whose training text has lines of up to ``most`` characters."""

    def __init__(self, most: int) -> None:
        self._most = most

    def longer_than_training(self) -> Callable[[str, str], bool]:
        return lambda source, target: max(len(source), len(target)) > self._most


class FakeShards:
    """Translations of three lines."""

    digest, lines = "0123456789abcdef", 3

    def __init__(self, lists: list[tuple[str, list[str]]], most: int) -> None:
        self._lists, self.teacher = lists, FakeTeacher(most)

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
    for most, first, counts in (
        (9, "los, und los", (0, 2)),
        (30, "los, und los", (0, 2)),
        (40, "los", (1, 1)),
    ):
        text = made(tmp_path / str(most), references, lists=lists, most=most)
        lines = (tmp_path / str(most) / "text/train.de").read_text().split("\n")
        assert lines[0] == f"der Hund rennt schnell {first}"
        assert (text.statistics.chosen, text.statistics.kept) == counts
    made(tmp_path / "alone", lists=lists, most=9)
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


def test_a_student_keeps_its_text(tmp_path: Path) -> None:
    text = made(tmp_path)
    references = tmp_path / "references.de"
    references.write_text("x\n" * 3)
    message = r"model: is trained on text made from other inputs: --target .* was not given before; give"
    with pytest.raises(InputError, match=message):
        made(tmp_path, references, trained=text.inputs)
    assert (tmp_path / "text/train.de").read_text() == "ein Hund\n\nzwei Katzen\n"


def test_several_processes_choose_the_same_in_the_same_order() -> None:
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
    command, streams = (
        [sys.executable, tmp_path / "killed.py"],
        {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL},
    )
    with subprocess.Popen(command, env=econmt_environment(), **streams) as process:
        children = process.stdout.readline().split()
    assert len(children) == 2
    for child in children:
        try:
            descriptor = os.pidfd_open(int(child))
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], 60)[0], "it still runs"
        os.close(descriptor)
