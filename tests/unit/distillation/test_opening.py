"""Model folders as teachers translate as econmt translate does."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import econmt
from econmt.errors import InputError
from econmt_distill.opening import open_teacher
from econmt_distill.teachers import TeacherChoice

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


def test_the_files_of_a_teacher_are_those_that_translate(word_model: Path) -> None:
    names = ("recipe.yaml", "params.best.safetensors", "vocab.source.txt", "vocab.target.txt")
    assert list(TeacherChoice(folder=word_model).files) == [f"the teacher's {name}" for name in names]


def test_what_cannot_teach_is_told(word_model: Path, tmp_path: Path) -> None:
    choice = TeacherChoice(folder=word_model)
    assert choice.with_nbest(None).nbest_size == 2, "the beam size of its recipe"
    assert replace(choice, beam_size=9).with_nbest(None).nbest_size == 5
    with pytest.raises(InputError, match="--nbest-size 4: more than the teacher's beam size of 3"):
        replace(choice, beam_size=3).with_nbest(4)
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
