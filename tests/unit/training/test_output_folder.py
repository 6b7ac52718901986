"""In which folders training may write: its own, new and empty ones, and never where something would be lost."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

from econmt.checkpoint.folder import ModelFolder
from econmt.cli.main import main
from econmt.errors import InputError
from econmt.training.interrupts import Interrupted, Interrupts
from tests.unit.training.test_run import go
from tests.unit.training.tiny import MakeRun, Run, snapshot, write_recipe

SHORT = "training.max_updates=2"


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below one, with what the files hold."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def dry_run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """The exit code of a dry run, and what it says."""
    with pytest.raises(SystemExit) as ended:
        main(["train", *map(str, words), "--dry-run"])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    """A run of two updates that has ended."""
    return make_run(SHORT).trained()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", ["training_state", "contents of training_state"])
def test_parameters_without_a_state_are_not_trained_over(make_run: MakeRun, lost: str) -> None:
    run = make_run("training.max_updates=4", "training.keep_last_params=2")
    go(run)
    first = snapshot(run.folder)
    shutil.rmtree(run.folder.states)
    if lost != "training_state":
        run.folder.states.mkdir()
    before = contents(run.folder.path)
    with pytest.raises(InputError) as caught:
        go(run)
    assert str(caught.value) == (
        f"{run.folder.path}: holds params.best.safetensors of an earlier run but no training state to resume; use "
        f"another output=DIR (training.initialize_from={run.folder.path} uses these), or start "
        "anew with --overwrite-output, which deletes them"
    )
    assert contents(run.folder.path) == before
    for name in ("params.best.safetensors", "metrics.tsv", "results.json", "params.00002.safetensors"):
        (run.folder.path / name).unlink()
        with pytest.raises(InputError, match="of an earlier run but no training state"):
            go(run)
    go(run, overwrite_output=True)
    assert snapshot(run.folder) == first


@pytest.mark.sampled(8)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        "recipe.yaml",
        "notes.tmp",
        "params.00001.safetensors",
        "training_state/thesis.txt metrics.tsv",
        "training_state/1968/thesis.txt",
        "training_state/ recipe.yaml",
        "prepared/thesis.txt",
        "recipe.yaml metrics.tsv notes.tmp params.00001.safetensors pictures/holiday.jpg log",
    ],
)
def test_a_folder_that_is_not_of_econmt_is_refused_and_untouched(
    make_run: MakeRun, names: str, overwrite: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(SHORT)
    for name in names.split():
        path = run.folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        else:
            path.write_text("# of someone else\n")
    own = run.folder.path.with_name("own.yaml")
    write_recipe(own, run.text, run.folder.path)
    before = contents(run.folder.path)
    message = rf"^{run.folder.path}: holds .* and is no model folder of econmt; use another"
    with pytest.raises(InputError, match=message):
        go(run, overwrite_output=overwrite)
    code, said = dry_run(capsys, own)
    assert (code, "and is no model folder of econmt" in said) == (2, True)
    assert contents(run.folder.path) == before


def test_three_files_of_others_are_named_and_further_ones_counted(tmp_path: Path) -> None:
    for names, more in (("abc", ""), ("abcd", " and 1 more")):
        for name in names:
            (tmp_path / name).touch()
        with pytest.raises(InputError, match=f": holds a, b, c{more} and is no model folder"):
            ModelFolder(tmp_path).check(overwrite=False)


def test_a_dry_run_writes_nothing(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("torch._dynamo")  # which makes its temporary folder when it is first imported
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    run = make_run(SHORT)
    budget = ["training.memory_budget=1GiB", "training.precision=auto"]
    for prepared in (False, True):
        before = contents(tmp_path)
        code, said = dry_run(capsys, tmp_path / "run.yaml", "data.prepared=null", *budget)
        assert (code, "pairs in" in said) == (0, True)
        assert contents(tmp_path) == before
        if not prepared:
            go(make_run(SHORT, "data.prepared=null"))
            assert (run.folder.path / "prepared").is_dir()


def test_a_dry_run_downloads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ECONMT_DATA", raising=False)
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("downloads"))
    monkeypatch.chdir(tmp_path)
    code, said = dry_run(capsys, "multi30k")
    assert code == 2
    assert "a dry run downloads nothing, econmt prepare does" in said
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_had_not_come_to_a_checkpoint_begins_again(
    make_run: MakeRun, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    with monkeypatch.context() as patch:
        patch.setattr(Interrupts, "pending", property(lambda self: True))
        patch.setattr(Interrupts, "exit_code", 143)
        with pytest.raises(Interrupted):
            go(run)
    assert run.folder.recipe.is_file()
    (run.folder.path / "notes.txt").write_text("mine")
    go(run)
    assert snapshot(run.folder) == snapshot(whole.folder)
    assert (run.folder.path / "notes.txt").read_text() == "mine"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["log", "metrics.tsv", "results.json", "hypotheses.00004", ".lock"])
def test_what_a_link_leads_to_is_not_written(run: Run, tmp_path: Path, name: str) -> None:
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    (run.folder.path / name).unlink(missing_ok=True)
    (run.folder.path / name).symlink_to(mine)
    for overwrite in (False, True):
        message = rf"{name}: a link to .*notes.txt, which training would overwrite"
        with pytest.raises(InputError, match=message):
            go(run, overwrite_output=overwrite)
    assert mine.read_text() == "mine"
    mine.unlink()
    with pytest.raises(InputError, match=message):  # writing would make the file
        run.folder.check(overwrite=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["params.00004.safetensors", "hypotheses.00004"])
def test_a_file_named_like_a_checkpoint_to_come_is_not_written(run: Run, name: str, overwrite: bool) -> None:
    (run.folder.path / name).write_text("mine")
    before = contents(run.folder.path)
    with pytest.raises(InputError, match=rf"{name}: not written by the run in this folder"):
        run.folder.check(overwrite=overwrite, last=4)
    run.folder.check(overwrite=overwrite, last=3)
    assert contents(run.folder.path) == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "is_folder", "words"),
    [
        ("pictures", False, "needs a folder of this name"),
        ("tensorboard", False, "needs a folder of this name"),
        ("log", True, "needs a file of this name"),
        ("params.00002.safetensors", True, "needs a file of this name"),
        ("training_state/00004/x", True, "has the name of a training state but is not one"),
    ],
)
def test_what_stands_where_a_run_writes_is_told_before(
    run: Run, name: str, is_folder: bool, words: str
) -> None:
    path = run.folder.path / name
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
    if is_folder:
        path.mkdir(parents=True)
    else:
        path.write_text("mine")
    with pytest.raises(InputError, match=words):
        run.folder.check(overwrite=False)


@pytest.mark.parametrize("place", ["/proc/x", "file", "file/x/y", "loop"])
def test_a_dry_run_needs_a_place_to_write_too(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="the model folder cannot be written"):
        ModelFolder(tmp_path / place).check_writable()
    ModelFolder(tmp_path / "new" / "folder").check_writable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]
