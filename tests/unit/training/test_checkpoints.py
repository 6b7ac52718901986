from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from econmt.checkpoint import checkpoints, recovery
from econmt.checkpoint.checkpoints import load_model
from econmt.checkpoint.folder import Commit, pending
from econmt.checkpoint.recovery import recover
from econmt.checkpoint.tensor_files import read_metadata, read_tensors, write_tensors
from econmt.errors import InputError, TrainingError
from econmt.export.model_folder import export_model
from tests.conftest import fails_with
from tests.unit.engine.toy import assert_same_bits, parameters
from tests.unit.training.tiny import MakeRun, Run, script, snapshot


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(text, tmp_path_factory.mktemp("trained") / "run", ("training.keep_last_params=9",)).trained()


@pytest.fixture
def copy(trained: Run, tmp_path: Path) -> Run:
    """A trained run that a test may break."""
    shutil.copytree(trained.folder.path, tmp_path / "copy")
    return Run(trained.text, tmp_path / "copy", ("training.keep_last_params=9",))


def test_files_have_the_parameters_of_training_and_say_whose(trained: Run) -> None:
    trainer, before = trained.trainer(), torch.get_rng_state()
    loaded = load_model(trained.folder.path, "last")
    assert torch.equal(torch.get_rng_state(), before), "it draws nothing"
    assert not loaded.model.training
    assert loaded.recipe == trained.recipe
    assert loaded.vocabularies.target.size == 12
    assert_same_bits(parameters(loaded.model), parameters(trainer.model))
    metadata = read_metadata(trained.folder.parameters(4))
    assert (metadata["format"], metadata["update"], len(metadata["vocabulary"])) == ("econmt-1", "4", 64)
    model = json.loads(metadata["model"])
    assert [model[name] for name in ("embedding", "source_size", "target_size")] == [6, 12, 12]
    assert model["encoder"]["size"] == 8


def test_which_checkpoint_is_the_last_or_another(copy: Run, trained: Run) -> None:
    for update in (99_999, 100_000):
        copy.folder.parameters(update).touch()
        assert checkpoints.parameter_file(copy.folder, "last") == copy.folder.parameters(update)
    (copy.folder.states / "00008.interrupted").mkdir()
    assert copy.folder.commits()[-2:] == [Commit(8, False), Commit(8, True)]

    def bias(which: str | int | Path) -> torch.Tensor:
        return load_model(trained.folder.path, which).model.output.bias

    assert torch.equal(bias(8), bias("last"))
    assert torch.equal(bias("00004"), bias(4))
    assert torch.equal(bias(trained.folder.parameters(4)), bias(4))
    assert not torch.equal(bias(2), bias(4))
    best = int(read_metadata(trained.folder.best)["update"])
    assert torch.equal(bias("best"), bias(best))
    with refused(r"no checkpoint '5' \(checkpoints of updates: 2, 4, 6, 8\)"):
        bias(5)
    with refused("checkpoint 'newest': use best, last or the number of an update"):
        bias("newest")


def refused(message: str) -> pytest.RaisesExc[InputError]:
    return pytest.raises(InputError, match=message)


def test_folders_and_vocabularies_of_others(tmp_path: Path, trained: Run, copy: Run) -> None:
    vocabulary = copy.folder.path / "vocab.source.txt"
    before = vocabulary.read_text()
    vocabulary.write_text(before.replace("a", "z"))
    message = rf"^{copy.folder.best}: belongs to another vocabulary \(fingerprint \w{{12}}, here \w{{12}}\); restore"
    with refused(message):
        load_model(copy.folder.path)
    vocabulary.write_text(before)
    with refused(f"^{tmp_path / 'absent'}: no such model folder"):
        load_model(tmp_path / "absent")
    with refused(f"^{tmp_path}: not a model folder, as it has no recipe.yaml"):
        load_model(tmp_path)
    with refused(f"^{copy.folder.recipe}: not a model folder, as it is a file"):
        load_model(copy.folder.recipe)
    copy.folder.best.unlink()
    with refused(r"no checkpoint 'best' \(checkpoints of updates: 2"):
        load_model(copy.folder.path)
    for path in copy.folder.numbered_parameters().values():
        path.unlink()
    with refused("no checkpoint 'best', and no other; train until the first, which"):
        load_model(copy.folder.path)
    exported = export_model(trained.folder.path, tmp_path / "exported")
    for which in ("last", 4):
        with refused(f"^{exported}: no checkpoint '{which}'; it has the best one alone$"):
            load_model(exported, which)


def test_parameters_of_another_model_are_refused_by_name_and_shape(copy: Run) -> None:
    tensors, metadata = read_tensors(copy.folder.best)
    bias, needed = "parameter 'output.bias' has", "but the recipe's model needs"
    for name, value, message in (
        ("output.bias", torch.zeros(5), rf"{bias} shape \(5,\), {needed} \(12,\)"),
        ("output.bias", None, "has no parameter 'output.bias'"),
        ("output.bias", torch.zeros(12).int(), f"{bias} type int32, {needed} float32; the file is damaged"),
        ("strange", torch.zeros(1), "has a parameter unknown to the model, 'strange'"),
    ):
        found = {key: tensor for key, tensor in {**tensors, name: value}.items() if tensor is not None}
        write_tensors(copy.folder.best, found, metadata)
        with refused(f"^{copy.folder.best}: {message}"):
            load_model(copy.folder.path)


def test_a_recipe_of_another_model_of_like_shapes_is_refused(copy: Run) -> None:
    recipe = copy.folder.recipe
    recipe.write_text(recipe.read_text().replace("dropout: 0.2", "dropout: 0.0"))
    assert load_model(copy.folder.path).recipe.model.dropout == 0.0, "which may differ"
    recipe.write_text(recipe.read_text().replace("reverse_input: false", "reverse_input: true"))
    with refused(rf"^{copy.folder.best}: was trained with model.encoder "):
        load_model(copy.folder.path)


def test_descriptions_without_a_key_and_with_another_vocabulary(copy: Run) -> None:
    tensors, metadata = read_tensors(copy.folder.best)
    description = json.loads(metadata["model"])
    assert description["encoder"].pop("rank") is None
    for key in (None, "rank", "unheard"):
        description["encoder"] |= {key: 2} if key else {}
        write_tensors(copy.folder.best, tensors, {**metadata, "model": json.dumps(description)})
        if key is None:
            assert load_model(copy.folder.path).recipe.model.encoder.rank is None
        else:
            with refused(rf"was trained with model\.encoder .*{key}"):
                load_model(copy.folder.path)
    tensors, metadata = read_tensors(copy.folder.parameters(8))
    write_tensors(copy.folder.parameters(8), tensors, {**metadata, "vocabulary": "0" * 64})
    with refused(rf"^{copy.folder.parameters(8)}: belongs to another vocabulary"):
        checkpoints.load_saved(copy.folder, Commit(8, True))


@pytest.mark.parametrize("last", [1, 2])
def test_the_best_and_the_last_are_kept(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Two at least, since a damaged newest one leads back to the one before."""
    script(monkeypatch, 5.0, 3.0, 4.0, 4.0, 6.0, 7.0)
    kept = []
    for updates in (2, 4, 6, 8, 10, 12):
        run = make_run(f"training.keep_last_params={last}", f"training.max_updates={updates}").trained()
        assert set(run.folder.numbered_hypotheses()) == set(run.folder.numbered_parameters())
        assert run.folder.commits() == [Commit(each, True) for each in (updates - 2, updates) if each]
        assert run.folder.temporaries() == []
        kept.append(sorted(run.folder.numbered_parameters()))
    assert kept == [[2], [2, 4], [4, 6], [4, 6, 8], [4, 8, 10], [4, 10, 12]]
    assert run.folder.best.read_bytes() == run.folder.parameters(4).read_bytes()


def test_without_hard_links_the_best_is_a_copy(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", fails_with(OSError(95, "Operation not supported")))
    run = make_run("training.max_updates=4").trained()
    best = int(read_metadata(run.folder.best)["update"])
    assert run.folder.best.read_bytes() == run.folder.parameters(best).read_bytes()
    assert run.folder.best.stat().st_nlink == 1
    assert recover(run.folder, 1, False) == (Commit(4, True), [])


OF_PATHS = ((Path, name) for name in ("replace", "rename", "unlink", "mkdir"))
OPERATIONS = [(os, "fsync"), (os, "link"), *OF_PATHS]


class Crash(BaseException):
    """Stands for a power cut: nothing after it runs, but what python does on its way out."""


@contextmanager
def failing(
    number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch, operations: Any = OPERATIONS
) -> Iterator[list[int]]:
    """Raises ``error`` instead of the file operation of that number, and of all after it."""
    count = [0]

    def wrap(original: Callable[..., object]) -> Callable[..., object]:
        def operation(*arguments: object, **keywords: object) -> object:
            count[0] += 1
            if count[0] >= number:
                raise error
            return original(*arguments, **keywords)

        return operation

    with monkeypatch.context() as patch:
        for owner, name in operations:
            patch.setattr(owner, name, wrap(getattr(owner, name)))
        yield count


@pytest.mark.slow
def test_a_crash_at_any_file_operation_loses_nothing(
    make_run: MakeRun, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_run("training.max_updates=4", name="base").trained()
    shutil.copytree(base.folder.path, base.folder.path.with_name("count"))
    with failing(10**9, Crash(), monkeypatch) as count:
        make_run("training.max_updates=6", name="count").train()
    operations = count[0]
    assert operations >= 20
    for number in range(1, operations + 1):
        name = f"crashed{number}"
        shutil.copytree(base.folder.path, base.folder.path.with_name(name))
        run = make_run("training.max_updates=6", name=name)
        with pytest.raises(Crash), failing(number, Crash(), monkeypatch):
            run.train()
        if number % 4 == 0:  # and once more while it is put in order
            with pytest.raises(Crash), failing(1, Crash(), monkeypatch):
                run.train()
        load_model(run.folder.path, "best")
        run = make_run(name=name).trained()
        assert snapshot(run.folder) == snapshot(whole.folder), number
        assert run.folder.temporaries() == []
        shutil.rmtree(run.folder.path)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EFBIG, "allow larger files (ulimit -f)"),
        (errno.EIO, "check the disk"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_leaves_nothing(
    copy: Run, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    """Neither before its commit nor after it; what is committed gets its final names."""
    folder = copy.folder
    before, paths = snapshot(folder), sorted(folder.path.rglob("*"))
    pending(folder.parameters(10)).write_bytes(b"half")
    (folder.path / ".params.00010.safetensors.new.77.partial").write_bytes(b"a quarter")
    (folder.states / "00010.tmp").mkdir()
    (folder.states / "00010.tmp" / "optimizer.safetensors").write_bytes(b"half")
    with pytest.raises(TrainingError) as caught, checkpoints.saving(folder, 10, 8):
        raise OSError(number, os.strerror(number))
    assert str(caught.value) == (
        f"{folder.path}: cannot save the checkpoint of update 10 ({os.strerror(number)}); the checkpoint of update 8 "
        f"is intact; {remedy} and run the same command to resume"
    )
    assert (snapshot(folder), sorted(folder.path.rglob("*"))) == (before, paths)
    folder.parameters(8).rename(pending(folder.parameters(8)))
    for _ in range(2):
        with pytest.raises(TrainingError), checkpoints.saving(folder, 8, 6):
            raise OSError(number, os.strerror(number))
        assert (snapshot(folder), sorted(folder.path.rglob("*"))) == (before, paths)
        monkeypatch.setattr(checkpoints, "remove_unfinished", fails_with(OSError()))
    with pytest.raises(TrainingError, match="there is no earlier one; "), checkpoints.saving(folder, 2, 0):
        raise OSError(number, os.strerror(number))


def test_a_state_that_is_damaged_a_second_time_is_set_aside_again(copy: Run) -> None:
    """What was set aside the first time gives way; a newer one that is damaged too goes with it."""
    state, newer = (copy.folder.state(commit) for commit in (Commit(8, True), Commit(9, False)))
    aside = shutil.copytree(state, state.with_name(f"{state.name}.damaged"))
    (state / "state.json").write_text("broken again")
    shutil.copytree(state, newer)
    commit, notes = recover(copy.folder, 2, False)
    assert commit == Commit(6, True)
    told = [note.partition(" cannot")[0] for note in notes]
    assert told[:2] == ["the state of update 9", "the state of update 8"]
    assert told[2:] == ["using the previous state instead, of update 6"]
    for path in (aside, newer.with_name(f"{newer.name}.damaged")):
        assert (path / "state.json").read_text() == "broken again"
    assert copy.folder.commits() == [commit]


def test_what_an_interrupted_removal_left_gives_way(copy: Run) -> None:
    """A state is renamed before it is removed; one of that name may be there from the time before."""
    state = checkpoints.load_state(copy.folder, Commit(8, True))
    old = shutil.copytree(copy.folder.state(Commit(6, True)), copy.folder.state(Commit(2, True)))
    left = shutil.copytree(old, old.with_name(f"{old.name}.tmp"))
    # Of an interruption, which the last one follows.
    shutil.copytree(old, copy.folder.state(Commit(7, False)))
    aside = copy.folder.state(Commit(8, True)).with_name("00008.damaged")
    aside.mkdir()
    recovery.finish_commit(copy.folder, state, 8, False)
    assert copy.folder.commits() == [Commit(6, True), Commit(8, True)]
    assert {left.exists(), aside.exists()} == {False}  # of an update that was written again


def test_a_lost_checkpoint_is_not_replaced_by_another_best(copy: Run) -> None:
    """The numbered file is restored from the best one only if that is the same checkpoint's."""
    state = checkpoints.load_state(copy.folder, Commit(8, True))
    numbered = copy.folder.parameters(state.best_update)
    content = numbered.read_bytes()
    tensors, metadata = read_tensors(numbered)
    numbered.unlink()
    recovery.finish_commit(copy.folder, state, 8, False)
    assert numbered.read_bytes() == content
    numbered.unlink()
    other = {**metadata, "update": str(state.best_update - 1)}
    write_tensors(copy.folder.best, tensors, other)
    recovery.finish_commit(copy.folder, state, 8, False)
    assert not numbered.exists()
    assert read_tensors(copy.folder.best)[1]["update"] == other["update"]


def test_leftovers_are_removed_and_damages_named(make_run: MakeRun, copy: Run) -> None:
    run = make_run()
    run.folder.create()
    pending(run.folder.parameters(2)).write_bytes(b"params of a checkpoint that was never committed")
    pending(run.folder.hypotheses(2)).write_text("x\n")
    (run.folder.path / ".params.00002.safetensors.new.77.partial").write_text("x")
    (run.folder.states / "00002.tmp").mkdir()
    assert recover(run.folder, 1, False) == (None, [])
    assert sorted(path.name for path in run.folder.path.iterdir()) == ["training_state"]
    assert list(run.folder.states.iterdir()) == []
    state = copy.folder.state(Commit(8, True))
    shutil.rmtree(copy.folder.state(Commit(6, True)))  # so that there is none to fall back to
    content = (state / "state.json").read_text()
    (state / "state.json").write_text(content[:100])
    with refused(rf"^{state / 'state.json'}: broken, not valid JSON"):
        copy.train()
    (state / "state.json").unlink()
    with refused(rf"^{state / 'state.json'}: cannot be read"):
        copy.train()
