"""Models as teachers translate as econmt translate does; their speed: which lines and which seconds count."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import econmt
from econmt.errors import EconmtError
from econmt_distill import timing
from econmt_distill.opening import open_teacher
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


OTHER: dict[str, tuple[object, bool]] = {
    "folder": (Path("other"), False),  # its files are compared
    "command": ("cat", True),
    "beam_size": (3, True),
    "nbest_size": (2, True),
    "batch_size": (2, False),
    "device": ("cuda", False),
    "threads": (2, False),
    "precision": ("float32", False),
    "codes": (("en", "de"), True),
}
"""Another value of each field of a teacher, and True if translations depend on it."""


def test_settings_name_what_translations_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("teacher", "other"):
        Path(name).mkdir()
        Path(name, "model.bin").touch()
    teacher = TeacherChoice(folder=Path("teacher"), device="cpu")
    assert {field.name for field in fields(TeacherChoice)} == OTHER.keys()
    for name, (value, matters) in OTHER.items():
        assert (replace(teacher, **{name: value}).settings != teacher.settings) == matters, name  # type: ignore[arg-type]
    expected = {"kind of teacher": "ctranslate2", "--beam-size": "the model's", "--nbest-size": "1"}
    assert teacher.settings == expected


@pytest.mark.parametrize(
    ("beam", "wanted", "sizes"),
    [
        (None, None, (5, 5)), (None, 5, (5, 5)), (None, 2, (5, 2)), (3, None, (3, 3)), (3, 3, (3, 3)),
        (8, None, (8, 5)), (8, 8, (8, 8)), (3, 4, None), (None, 6, None),
    ],
)  # fmt: skip
def test_several_translations_are_at_most_those_of_the_beam(
    beam: int | None, wanted: int | None, sizes: tuple[int, int] | None
) -> None:
    teacher = TeacherChoice(command="cat", beam_size=beam)
    if sizes is None:
        with pytest.raises(EconmtError, match=f"--nbest-size {wanted}: more than the teacher's beam size of"):
            teacher.with_nbest(wanted)
    else:
        assert teacher.with_nbest(wanted) == replace(teacher, beam_size=sizes[0], nbest_size=sizes[1])


LINES = ["a b c", "", "d e", "a " * 1200, "h g f e d c b a", "b " * 1001]


def test_a_model_folder_translates_as_econmt_does(
    word_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = TeacherChoice(folder=word_model, beam_size=3, nbest_size=2, device="cpu", threads=1)
    counted: list[int] = []
    teacher = open_teacher(choice)
    found = teacher.translate(LINES, "text.en", 11, counted.append)
    assert sum(counted) == len(LINES)
    assert [found[number] for number in (1, 3, 5)] == [[""]] * 3, "blank and much too long lines"
    model = econmt.load(word_model, device="cpu")
    for line, texts in zip(LINES, found, strict=True):
        if texts != [""]:
            (expected,) = model.translate([line], beam_size=3, nbest_size=2)
            assert texts == [each.text for each in expected.hypotheses]
    warning = capsys.readouterr().err
    assert warning.startswith("econmt: warning: text.en:14: ")
    assert warning.endswith("(and 1 more line; lines of later shards are not named)\n")
    teacher.translate(LINES, "text.en", 31, lambda _: None)
    assert not capsys.readouterr().err


def test_what_a_teacher_learnt_and_how_it_teaches(word_model: Path, tmp_path: Path) -> None:
    most = econmt.load(word_model, device="cpu").recipe.pairs.max_length
    too_long = TeacherChoice(folder=word_model).longer_than_training()
    assert too_long is not None
    fits, over = "a " * most, "a " * (most + 1)
    assert [too_long(*texts) for texts in ((fits, fits), (over, "A"), ("a", over))] == [False, True, True]
    names = ("recipe.yaml", "params.best.safetensors", "vocab.source.txt", "vocab.target.txt")
    assert list(TeacherChoice(folder=word_model).files) == [f"the teacher's {name}" for name in names]
    choice = TeacherChoice(folder=word_model)
    assert choice.with_nbest(None).nbest_size == 2, "the beam size of its recipe"
    (tmp_path / "config.json").write_text("{}")
    assert TeacherChoice(folder=tmp_path).kind == "transformers"


def test_a_translation_of_ctranslate2_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of single bytes can spell any character."""
    for name in ("model.bin", "both.spm"):
        (tmp_path / name).touch()
    result = SimpleNamespace(hypotheses=[["piece"]])
    translator = SimpleNamespace(translate_batch=lambda lines, **_: [result for _ in lines])
    package = SimpleNamespace(Translator=lambda *_, **__: translator)
    monkeypatch.setitem(sys.modules, "ctranslate2", package)
    pieces = SimpleNamespace(encode=lambda line, out_type: line.split(), decode=lambda tokens: " a\nb\r\0c ")
    monkeypatch.setattr("sentencepiece.SentencePieceProcessor", lambda model_file: pieces)
    teacher = open_teacher(TeacherChoice(folder=tmp_path, device="cpu"))
    assert teacher.translate(["two cats", ""], "text", 1, lambda _: None) == [["a b c"], [""]]
