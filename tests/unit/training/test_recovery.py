"""Damaged states and parameters: found, told, and gone around by the checkpoint before; nothing of others removed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from torch import Tensor

from econmt.checkpoint import checkpoints
from econmt.checkpoint.checkpoints import load_state
from econmt.checkpoint.folder import Commit, ModelFolder, pending
from econmt.checkpoint.recovery import changed_keys, finish_commit
from econmt.checkpoint.tensor_files import read_tensors, write_text
from econmt.config.recipe import load_recipe, recipe_text
from econmt.errors import InputError, TrainingError
from econmt.training.progress import Progress
from econmt.training.run import train
from tests.unit.training.test_output_folder import contents
from tests.unit.training.tiny import MakeRun, Run, leave, script, snapshot

NEWEST = "training_state/00006"


@pytest.fixture(scope="module")
def at_six(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(text, tmp_path_factory.mktemp("six") / "run", ("training.max_updates=6",)).trained()


@pytest.fixture
def run(at_six: Run, tmp_path: Path) -> Run:
    """A run that has come to update 6, which a test may break, and go on with to 8."""
    shutil.copytree(at_six.folder.path, tmp_path / "run")
    return Run(at_six.text, tmp_path / "run")


def flip(path: Path) -> None:
    """Flips a bit in the last tensor of a file, or a digit of a text."""
    content = bytearray(path.read_bytes())
    if path.suffix == ".json":
        place = content.index(b'"target_tokens": ') + len(b'"target_tokens": ')
        content[place] = ord("1") if content[place] != ord("1") else ord("2")
    else:
        content[-1] ^= 0x40
    path.unlink()  # its other name, the best's, stays whole
    path.write_bytes(content)


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize(
    "name", [f"{NEWEST}/optimizer.safetensors", f"{NEWEST}/state.json", "params.00006.safetensors"]
)
def test_a_damaged_newest_state_is_gone_around(
    run: Run, whole: Run, name: str, damage: Callable[[Path], None]
) -> None:
    best = run.folder.best.read_bytes()
    damage(run.folder.path / name)
    if name.startswith("params") and run.folder.best.exists():
        (run.folder.path / "params.best.safetensors").write_bytes(best)
    run.train()
    assert f"the state of update 6 cannot be used: {run.folder.path / name}: " in run.said()
    assert "using the previous state instead, of update 4" in run.said()
    assert "resuming from update 4" in run.said()
    assert snapshot(run.folder) == snapshot(whole.folder)
    assert sorted(path.name for path in run.folder.states.iterdir()) == ["00006", "00008"]


def test_a_state_that_is_set_aside_stays_until_there_is_a_newer_one(run: Run) -> None:
    flip(run.folder.path / NEWEST / "optimizer.safetensors")
    parameters = run.folder.parameters(6).read_bytes()
    run.trainer()
    assert run.folder.commits() == [Commit(4, True)]
    assert (run.folder.states / "00006.damaged" / "optimizer.safetensors").is_file()
    another = shutil.copytree(run.folder.path, run.folder.path.with_name("another"))
    ModelFolder(another).clear()
    assert list((another / "training_state").iterdir()) == []
    assert run.folder.parameters(6).read_bytes() == parameters
    Run(run.text, run.folder.path, ("training.max_updates=6",)).train()
    assert sorted(path.name for path in run.folder.states.iterdir()) == ["00004", "00006"]


def test_the_best_states_of_the_newest_and_of_the_one_before_are_kept(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plateau may come at the last checkpoint, or again at it when the state before is resumed from."""
    script(monkeypatch, 3.0, 4.0, 4.5, 2.0)
    run = make_run("training.schedule.name=plateau-reduce").trained()
    assert [row["update"] for row in run.trainer().state.metrics] == [2, 4, 6, 8]
    assert run.trainer().state.best_update == 8
    assert sorted(path.name for path in run.folder.states.iterdir()) == ["00002", "00006", "00008"]


def test_without_a_state_that_can_be_read_nothing_is_touched(run: Run) -> None:
    for number in ("00004", "00006"):
        flip(run.folder.states / number / "optimizer.safetensors")
    before = contents(run.folder.path)
    newest = run.folder.path / NEWEST / "optimizer.safetensors"
    with pytest.raises(InputError, match=rf"^{newest}: damaged \(its checksum is wrong\)"):
        run.train()
    assert contents(run.folder.path) == before


def test_an_interrupted_state_is_gone_around_too(run: Run, whole: Run) -> None:
    state = run.folder.states / "00007.interrupted"
    shutil.copytree(run.folder.path / NEWEST, state)
    (state / "params.safetensors").write_bytes(b"")
    run.train()
    assert f"the state of update 7 cannot be used: {state / 'params.safetensors'}: " in run.said()
    assert "resuming from update 6" in run.said()
    assert snapshot(run.folder) == snapshot(whole.folder)


def test_a_state_that_cannot_be_read_back_stops_training_and_the_one_before_goes_on(
    make_run: MakeRun, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    write = checkpoints.write_tensors

    def damaging(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        write(path, tensors, metadata)
        if path.name == "optimizer.safetensors" and metadata["update"] == "6":
            flip(path)

    message = r"update 6 cannot be read back \(.*\); the checkpoint of update 4 is"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_tensors", damaging)
        with pytest.raises(TrainingError, match=message) as e:
            run.train()
    assert "\n" not in str(e.value)
    assert Commit(4, True) in run.folder.commits()
    run.train()
    assert "resuming from update 4" in run.said()
    assert snapshot(run.folder) == snapshot(whole.folder)


def test_the_best_is_made_whole_by_its_other_name(run: Run) -> None:
    best = int(read_tensors(run.folder.best)[1]["update"])
    content = run.folder.best.read_bytes()
    run.folder.best.unlink()
    run.trainer()
    assert run.folder.best.read_bytes() == content
    if best != 6:
        run.folder.parameters(best).unlink()
        run.trainer()
        assert run.folder.parameters(best).read_bytes() == content


def test_a_best_that_is_lost_is_said(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, 5.0, 3.0, 4.0, 4.0, 2.0)
    make_run("training.max_updates=6").train()
    run = make_run("training.max_updates=10")
    with run.folder.parameters(4).open("r+b") as file:  # under both names
        file.seek(-1, 2)
        file.write(b"\x7f")
    run.train()
    said = f"the best checkpoint so far is lost; the next better one replaces it: {run.folder.best}: damaged"
    assert said in run.said()
    assert read_tensors(run.folder.best)[1]["update"] == "10"


def test_a_plateau_goes_back_without_the_optimizer_state_that_is_damaged(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, 3.0, 4.0, 4.0, 5.0)
    plateau = ("training.schedule.name=plateau-reduce", "training.schedule.reduce_num_not_improved=3")
    make_run(*plateau, "training.max_updates=6").train()
    run = make_run(*plateau)
    flip(run.folder.states / "00002" / "optimizer.safetensors")
    run.train()
    assert "the best checkpoint's optimizer state cannot be used: " in run.said()
    assert json.loads((run.folder.states / "00008" / "state.json").read_text())["parameters_from"] == 2


OTHERS = (
    "notes.tmp",
    "params.77777.safetensors",
    "hypotheses.77777",
    ".draft.1.partial",
    "pictures/holiday.jpg",
    "tensorboard/notes",
    "training_state/backup/optimizer.safetensors",
    "training_state/notes.tmp",
    "training_state/00003.tmp/state.json",
    "training_state/00003.tmp/notes",
    "probe.tmp",
)


def test_what_a_save_left_half_is_no_obstacle_to_the_next(run: Run, whole: Run) -> None:
    context = run.context()
    for name in ("00008.tmp/state.json", "../params.best.safetensors.tmp"):
        path = run.folder.states / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
    train(context, run.console)
    assert snapshot(run.folder) == snapshot(whole.folder)
    finish_commit(run.folder, load_state(run.folder, Commit(8, True)), 1, False)
    (run.folder.path / "params.best.safetensors").unlink()
    (run.folder.path / "params.best.safetensors.tmp").write_text("half")
    state = load_state(run.folder, Commit(8, True))
    finish_commit(run.folder, state, 1, False)
    assert snapshot(run.folder) == snapshot(whole.folder)
    assert run.folder.best.samefile(run.folder.parameters(state.best_update)), "not a second time on the disk"


def test_files_of_a_checkpoint_at_the_update_of_an_interruption_are_not_taken_for_its_own(run: Run) -> None:
    """It was stopped at 7, went on to validate there, and was killed before the commit."""
    trainer = run.trainer()
    trainer._update(Progress.silent())
    leave(trainer)
    paths = [run.folder.parameters(7), run.folder.hypotheses(7)]
    for path in paths:
        pending(path).write_text("not proved")
    assert run.trainer().state.update == 7
    assert not any(path.exists() or pending(path).exists() for path in paths)


def test_files_of_others_in_a_model_folder_stay(run: Run) -> None:
    for name in OTHERS:
        path = run.folder.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"of someone else: {name}")
    run.train()
    for name in OTHERS:
        assert (run.folder.path / name).read_text() == f"of someone else: {name}"
    run.folder.clear()
    files = {str(path.relative_to(run.folder.path)) for path in run.folder.path.rglob("*") if path.is_file()}
    assert files == {*OTHERS, "vocab.source.txt", "vocab.target.txt"}


def test_a_key_that_gets_an_effect_is_a_change(tmp_path: Path) -> None:
    """A key is left aside only if it has no effect in either recipe."""
    folder, before = ModelFolder(tmp_path), load_recipe("quickstart")
    after = load_recipe("quickstart", ["training.optimizer.name=sgd", "training.optimizer.momentum=0.5"])
    for old, new in ((before, after), (after, before)):
        write_text(folder.recipe, recipe_text(old))
        keys = {change.split()[0] for change in changed_keys(new, folder)}
        assert {"training.optimizer.name", "training.optimizer.momentum"} <= keys
