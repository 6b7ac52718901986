"""The command from its teacher to its table, stopped and resumed in every stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from econmt.config.recipe import load_recipe
from econmt_distill import measuring, stages, timing
from econmt_distill.teachers import TeacherChoice
from econmt_distill.timing import TimedTranslations
from tests.conftest import fails_with
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.distillation.conftest import STUDENT, calls
from tests.unit.training.tiny import write_text

COMPLETE = ["--command", "cat", "data.target=trg", "-s", "train.src", "--valid", "valid"]
"""Options with which nothing is missing."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Text, and a student's recipe."""
    write_text(tmp_path, {"train": 40, "valid": 4, "test": 5})
    (tmp_path / "small.yaml").write_text(STUDENT)
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times in this process."""

    def timed(model: TeacherChoice | Path, lines: Sequence[str]) -> TimedTranslations:
        task = {"runtime": str(model)} if isinstance(model, Path) else {"teacher": vars(model).copy()}
        return TimedTranslations(timing._translator(task)(list(lines)), 2.0)

    monkeypatch.setattr(measuring, "timed", timed)


def words(program: str, *more: object) -> list[object]:
    texts = ["-s", "train.src", "--valid", "valid", "--test", "test", "-r", "small.yaml", "-o", "out"]
    return ["distill", "--command", program, *texts, "--shard-lines", 16, *more]


@pytest.mark.usefixtures("quick")
def test_a_program_teaches_and_the_same_command_goes_on(
    folder: Path, program: Callable[..., str], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage is stopped once, before it begins; what came before is never done again."""
    command = words(program())
    for stage in ("make_text", "train", "pack", "measure"):
        with monkeypatch.context() as patch:
            patch.setattr(stages, stage, fails_with(KeyboardInterrupt()))
            ended = call(*command)
            assert ended.code == 130
            assert ended.err.endswith("econmt: stopped; run the same command to go on in out\n")
        assert calls(folder) == [16, 16, 8], stage
        assert (folder / "out/model").exists() == (stage in ("pack", "measure"))
    done = call(*command).succeeded()
    assert calls(folder) == [16, 16, 8, 5, 5], "the test text is translated once, and once for its time"
    assert (folder / "out/text/train.trg").read_text() == (folder / "train.src").read_text().upper()
    written = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("*.safetensors")}
    assert {"params.best.safetensors", "arrays.safetensors"} <= {path.name for path in written}
    again = call(*command)
    assert (again.code, again.out) == (0, done.out)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert len(calls(folder)) == 5
    begins = [line.split()[0] for line in done.lines if ": " in line]
    assert begins[-3:] == ["teacher:", "student:", "student,"]


def test_threads_limit_the_processes_that_make_the_text(
    folder: Path, program: Callable[..., str], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[int] = []

    def make_text(*arguments: object) -> None:
        processes.append(arguments[5])
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "make_text", make_text)
    monkeypatch.setattr(stages, "usable_cores", lambda: 7)
    for options in (["--threads", 3], []):
        assert call(*words(program(), *options)).code == 130
    assert processes == [3, 7]


@pytest.mark.usefixtures("quick")
def test_results_are_printed_and_written_as_json(
    folder: Path, program: Callable[..., str], call: Call
) -> None:
    done = call(*words(program(), "--json"))
    results = json.loads(done.out)
    assert (results["text"], results["corpus"], results["sentences"]) == ("test", "test", 5)
    teacher, student, packed = results["models"]
    assert teacher["form"] == "teacher"
    assert teacher["bytes"] is None
    assert teacher["words_per_second"] == len((folder / "test.src").read_text().split()) / 2.0
    assert 0 <= packed["bleu"] <= teacher["bleu"] <= 100
    runtime = sum(path.stat().st_size for path in (folder / "out/runtime").rglob("*") if path.is_file())
    assert packed["bytes"] == runtime
    assert student["bytes"] < packed["bytes"]
    written = json.loads((folder / "out/results.json").read_text())
    assert {key: written[key] for key in results} == results
    assert "python out/runtime < TEXT" in done.err
    (folder / "test.trg").write_text((folder / "test.src").read_text().upper())
    assert json.loads(call(*words(program(), "--json")).out)["models"][0]["bleu"] == pytest.approx(100.0)
    smaller = json.loads(call(*words(program(), "--json", "--shortlist", 2)).out)["models"][2]
    assert smaller["bytes"] < runtime, "with another lexicon"


@pytest.mark.usefixtures("quick")
def test_a_model_folder_teaches_by_the_references(
    folder: Path, word_model: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Languages, validation and test text are the teacher's; a line that is too long for it keeps its reference."""
    monkeypatch.chdir(folder)
    most = load_recipe(word_model / "recipe.yaml").pairs.max_length
    sources = (folder / "train.src").read_text().splitlines()
    sources[3] = "a " * most + "a"
    (folder / "train.src").write_text("".join(f"{line}\n" for line in sources))
    command = ["distill", word_model, "-s", "train.src", "-r", "small.yaml", "-o", "out"]
    done = call(*command, "-t", "train.trg", "--nbest-size", 2).succeeded()
    lists = [json.loads(line) for line in (folder / "out/translations/00000.jsonl").read_text().splitlines()]
    assert len(lists) == 40
    assert max(map(len, lists)) == 2
    texts = (folder / "out/text/train.trg").read_text().splitlines()
    chosen = [text in options for text, options in zip(texts, lists, strict=True)]
    assert all(chosen[:3] + chosen[4:])
    assert texts[3] == (folder / "train.trg").read_text().splitlines()[3]
    said = "the reference itself is learnt for 1 line, longer than data.max_length of the teacher or"
    assert said in done.err
    without = call(*command)
    assert without.code == 2
    assert "other inputs: --beam-size 2 -> the model's; --nbest-size 2 -> 1" in without.err


@pytest.mark.usefixtures("quick")
def test_what_an_error_says_to_delete_is_made_again(
    folder: Path, program: Callable[..., str], call: Call
) -> None:
    assert call(*words(program())).code == 0
    other = words("cat", "data.filters.identical=keep")
    assert "delete out/translations to translate again" in call(*other).err
    shutil.rmtree(folder / "out/translations")
    assert "delete out/model to train again" in call(*other).err
    shutil.rmtree(folder / "out/model")
    call(*other).succeeded()
    assert (folder / "out/text/train.trg").read_text() == (folder / "train.src").read_text()
    wider = "out/model: is trained with another recipe: model.embedding 6 -> 8; give the same, another --output, or del"
    assert wider in call(*other, "model.embedding=8").err


@pytest.mark.usefixtures("quick")
def test_the_folder_may_be_moved_and_spelled_otherwise(
    folder: Path, program: Callable[..., str], call: Call
) -> None:
    command = words(program())
    done = call(*command).succeeded()
    made = calls(folder)
    absolute = call(*command[:-4], "-o", folder / "out", *command[-2:])
    assert (absolute.code, absolute.out) == (0, done.out), absolute.err
    (folder / "elsewhere").mkdir()
    moved = (folder / "out").rename(folder / "elsewhere/moved")
    again = call(*command[:-4], "-o", moved, *command[-2:], "training.max_updates=6").succeeded()
    assert "resuming from update 4" in again.err
    assert calls(folder)[len(made) :] == [5], "only the time is taken again, with the new student"


def test_a_prefix_that_hides_behind_the_distilled_text_is_refused(
    folder: Path, program: Callable[..., str], call: Call
) -> None:
    done = call(*words(program(), "--also", "text/./train"))
    refused(done, f"text/./train: the student's recipe names the distilled text so; give {folder}/text/train")
    assert calls(folder) == []
    (folder / "out").mkdir()
    (folder / "out/recipe.yaml").write_text("name: mine\n")
    refused(call(*words(program())), "out: holds recipe.yaml and no distillation; give another --output")
    assert calls(folder) == []


def test_the_teacher_is_timed_with_lines_from_the_whole_text(
    folder: Path, program: Callable[..., str], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[list[str]] = []

    def timed(model: TeacherChoice | Path, lines: Sequence[str]) -> TimedTranslations:
        texts.append(list(lines))
        return TimedTranslations(["X"] * len(lines), 2.0)

    monkeypatch.setattr(measuring, "timed", timed)
    monkeypatch.setattr(measuring, "SAMPLE", 2)
    assert call(*words(program())).code == 0
    lines = (folder / "test.src").read_text().splitlines()
    assert texts == [lines[::2], lines, lines]


@pytest.mark.usefixtures("quick")
def test_copies_are_told(folder: Path, program: Callable[..., str], call: Call) -> None:
    source, half = folder / "train.src", "lower() if n % 2 else line.upper(), end='')"
    code = "import sys\nfor n, line in enumerate(sys.stdin): print(line."
    left = (
        "no training pair is left of 40: 0 longer than data.max_length 100 tokens on a side, 40 with the same"
    )
    for command, more, code_of, copies, last in (
        ("cat", (), 2, 40, left),
        (code + half, (), 0, None, ""),
        (code + half.replace("% 2", "% 3"), (), 0, 25, ""),
        (code + half.replace("n % 2", "0 < n < 8"), (), 0, 21, ""),
        ("cat", ("data.filters.identical=keep",), 0, 40, ""),
    ):
        command = command if command == "cat" else program(command)
        done = call(*words(command, *more))
        assert done.code == code_of, done.err
        warning = f"warning: {command}: many translations are copies of their source, {copies} of 40 lines"
        assert (warning if copies else "") in done.err
        assert ("copies of" in done.err) == (copies is not None)
        assert last in done.err
        shutil.rmtree(folder / "out")
        if code_of:
            source.write_text(source.read_text() + "\n \n")


@pytest.mark.usefixtures("quick")
def test_a_broken_record_costs_no_more_than_what_it_is_about(
    folder: Path, program: Callable[..., str], call: Call
) -> None:
    command = words(program())
    done = call(*command)
    for record in ("packed.json", "trained-on.json", "text/inputs.json"):
        (folder / "out" / record).write_text("{")
        removed = record.partition("/")[0]
        assert f"remove out/{removed} and run the command again" in call(*command).err
        (folder / "out" / removed).rename(folder / removed)
        assert call(*command).out == done.out
    assert calls(folder) == [16, 16, 8, 5, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-s", "train.src"], "give either a TEACHER, the folder of a model, or a program as --command"),
        (["--command", "cat", "-s", "train.src", "-b", 2], "--beam-size is for models; the program"),
        (["--command", "cat", "-s", "train.src", "-t", "x"], "--target is for models"),
        (["nosuch", "-s", "train.src"], "nosuch: no such folder; give a model folder, or a program"),
        ([".", "-s", "train.src"], ".: holds no model"),
        (["nosuch", "-s", "train.src", "--nbest-size", 2], "--nbest-size is for --target"),
        (["--command", "cat", "-s", "train.src"], "give data.target=LANGUAGE and --valid PREFIX"),
        ([*COMPLETE, "--valid", "x"], "text x not found"),
        ([*COMPLETE, "--test", "x"], "text x not found"),
        ([*COMPLETE, "--also", "x"], "text x not found"),
        ([*COMPLETE, "data.target=src"], "data.source and data.target are both src"),
        ([*COMPLETE, "training.early_stopping.metric=hook"], "needs a validation hook"),
        ([*COMPLETE, "training.initialize_from=nothing"], "training.initialize_from nothing: no such file"),
        ([*COMPLETE, "data.train=[x]"], "data.train cannot be changed; use --also"),
        ([*COMPLETE, "-r", "wikitext2"], "wikitext2: trains a language model"),
        ([*COMPLETE, "model.encoder.cell=sru"], "runtime does not support model.encoder.cell: sru"),
    ],
)
def test_wrong_options_are_told_before_anything_is_translated(
    folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch, arguments: list[object], message: str
) -> None:
    monkeypatch.chdir(folder)
    done = call("distill", *arguments, "-o", "out")
    assert done.code == 2, done.err
    assert message in done.err
    assert not (folder / "out/translations").exists()


@pytest.mark.slow
def test_models_are_timed_in_a_process_of_their_own(word_model: Path, tmp_path: Path) -> None:
    result = timing.timed(TeacherChoice(folder=word_model), ["a b", "c"])
    assert len(result.texts) == 2
    assert 0 < result.seconds < 60
    with pytest.raises(timing.EconmtError, match=r"nothing: cannot be timed: .*model.json"):
        timing.timed(tmp_path / "nothing", ["a"])
