from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from econmt.checkpoint.folder import Commit, ModelFolder
from econmt.data.batching.store import prepare
from econmt.engine import precision
from econmt.engine.precision import ProductTimes
from econmt.errors import InputError
from econmt.training import validation
from econmt.training.context import _TEXT, _checksum_of
from econmt.training.interrupts import Interrupted, Interrupts
from econmt.training.run import run_recipe
from econmt.training.trainer import Trainer
from tests.unit.training.tiny import Run, metrics, snapshot, write_text

MakeRun = Callable[..., Run]


def contents(folder: ModelFolder) -> dict[str, tuple[int, int]]:
    """Every file with its inode and time of change."""
    files = (path for path in folder.path.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def interrupt_after(monkeypatch: pytest.MonkeyPatch, updates: int, interrupts: list[Interrupts]) -> None:
    """Makes a signal arrive during the given update."""
    original = Trainer._update

    def update(self: Trainer, progress: object) -> None:
        original(self, progress)  # type: ignore[arg-type]
        if self.state.update == updates:
            interrupts[-1].received = signal.SIGTERM

    monkeypatch.setattr(Trainer, "_update", update)
    created = Interrupts.__init__

    def remember(self: Interrupts) -> None:
        created(self)
        interrupts.append(self)

    monkeypatch.setattr(Interrupts, "__init__", remember)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("update", [1, 3, 5])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    make_run: MakeRun, whole: Run, monkeypatch: pytest.MonkeyPatch, update: int
) -> None:
    run = make_run(name="interrupted")
    with monkeypatch.context() as patch:
        interrupt_after(patch, update, [])
        with pytest.raises(Interrupted) as caught:
            run.train()
    message = f"SIGTERM: saved at update {update} in {run.folder.path}; run the same command to resume"
    assert (str(caught.value), caught.value.exit_code) == (message, 143)
    assert run.folder.commits()[-1] == Commit(update, False)
    # An interruption is no checkpoint: it adds no parameter file and no row of metrics.
    assert len(run.folder.numbered_parameters()) == (1 if update > 1 else 0)
    assert run.folder.metrics.exists() == (update > 1)
    run.train()
    assert snapshot(run.folder) == snapshot(whole.folder)
    assert run.folder.commits() == [Commit(6, True), Commit(8, True)]


def test_an_interruption_in_validation_repeats_it(
    make_run: MakeRun, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(name="interrupted")
    asked = []

    def pending(self: Interrupts) -> bool:
        # The first questions come before each update and checkpoint 2; then validation asks before each batch.
        asked.append(self)
        if len(asked) >= 7:
            self.received = signal.SIGINT
        return self.received is not None

    with monkeypatch.context() as patch:
        patch.setattr(Interrupts, "pending", property(pending))
        with pytest.raises(Interrupted) as caught:
            run.train()
    assert caught.value.exit_code == 130
    assert "Ctrl-C: saved at update 2" in str(caught.value)
    assert run.folder.commits() == [Commit(2, False)]
    assert not run.folder.metrics.exists()
    run.train()
    assert snapshot(run.folder) == snapshot(whole.folder)


def go(run: Run, **keywords: bool) -> object:
    return run_recipe(run.recipe, [run.text], console=run.console, **keywords)


def test_a_finished_run_is_left_alone_and_goes_on_with_a_higher_limit(make_run: MakeRun, whole: Run) -> None:
    run = make_run("training.max_updates=4")
    outcome = run_recipe(run.recipe, [run.text], console=run.console)
    assert outcome.results is not None
    before = contents(run.folder)
    again = run_recipe(run.recipe, [run.text], console=run.console)
    assert again.results is None
    assert again.training.reason == "max_updates 4 reached"
    assert contents(run.folder) == before
    longer = make_run("training.max_updates=8")
    outcome = run_recipe(longer.recipe, [run.text], console=run.console)
    assert outcome.training.update == 8
    assert snapshot(longer.folder) == snapshot(whole.folder)


@pytest.mark.usefixtures("pictures")
def test_results_that_a_crash_prevented_are_made_by_the_next_run(make_run: MakeRun) -> None:
    run = make_run(f"data.test={make_run().text}/test", "training.max_updates=2")
    go(run)
    before = run.folder.test_hypotheses.read_text()
    assert len(before.splitlines()) == 4
    run.folder.results.unlink()
    run.folder.test_hypotheses.unlink()
    outcome = run_recipe(run.recipe, [run.text], console=run.console)
    assert outcome.results is not None
    assert outcome.results.corpus == "test"
    assert len(outcome.results.samples) == 3
    assert run.folder.test_hypotheses.read_text() == before
    assert [path.name for path in outcome.results.pictures] == ["learning_curve.png", "attention.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in outcome.results.pictures)
    assert outcome.results.ledger.category("weights") > 0
    assert outcome.results.ledger.category("optimizer state") == pytest.approx(
        2 * outcome.results.ledger.category("weights"), rel=0.05
    )


def test_keys_that_change_what_is_learnt_are_refused_and_listed(make_run: MakeRun) -> None:
    make_run("training.max_updates=2").train()
    run = make_run(
        "training.max_updates=3",
        "model.dropout=0.1",
        "training.optimizer.betas=[0.5, 0.9]",
        "training.label_smoothing=0.1",
    )
    with pytest.raises(InputError) as caught:
        run.train()
    message = str(caught.value)
    assert message.startswith(
        f"{run.folder.path}: was trained with another recipe: model.dropout 0.2 -> 0.1; "
    )
    assert "training.optimizer.betas (0.9, 0.999) -> (0.5, 0.9)" in message
    assert "training.label_smoothing 0.0 -> 0.1" in message
    assert "max_updates" not in message
    assert "--resume-with-changes" in message
    assert "--overwrite-output" in message
    result = run.train(resume_with_changes=True)
    assert result.update == 3
    assert "resuming with a changed recipe: model.dropout 0.2 -> 0.1" in run.said()
    run.train()  # the folder has the new recipe now


def test_a_run_that_is_refused_is_left_as_it_was(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([3.0, 4.0, 4.0])
    monkeypatch.setattr("econmt.training.validation.perplexity", lambda *arguments: next(found))
    plateau = "training.schedule.name=plateau-reduce"
    make_run(plateau, "training.max_updates=6", "training.keep_last_params=3").train()
    run = make_run("training.max_updates=8", "training.keep_last_params=1")
    before = contents(run.folder)
    with pytest.raises(InputError, match=r"schedule\.name plateau-reduce -"):
        run.train()
    assert contents(run.folder) == before


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("data.train=[nowhere]", "nowhere"),
        ("training.param_dtype=bfloat16", "param_dtype: bfloat16 cannot be combined with .* float32"),
    ],
)
def test_overwriting_with_what_cannot_be_used_keeps_the_old_run(
    make_run: MakeRun, key: str, message: str
) -> None:
    run = make_run("training.max_updates=2")
    run.train()
    before = snapshot(run.folder)
    other = make_run(key, "training.precision=auto")
    with pytest.raises(InputError, match=message):
        run_recipe(other.recipe, [run.text], console=other.console, overwrite_output=True)
    assert snapshot(run.folder) == before


def test_keys_that_only_say_how_to_run_may_differ(make_run: MakeRun) -> None:
    make_run("training.max_updates=2").train()
    run = make_run(
        "name=other",
        "training.max_updates=3",
        "training.max_epochs=50",
        "training.max_seconds=10000",
        "training.early_stopping.max_num_checkpoint_not_improved=null",
        "training.log_interval=1",
        "training.keep_last_params=5",
        "training.threads=null",
    )
    assert run.train().update == 3


def test_another_optimizer_starts_with_a_fresh_state(make_run: MakeRun) -> None:
    make_run("training.max_updates=2").train()
    run = make_run("training.max_updates=4", "training.optimizer.name=sgd")
    run.train(resume_with_changes=True)
    assert "the saved optimizer is adam; its state is not used" in run.said()
    assert run.trainer().optimizer.state == {}


def test_changed_text_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    text = tmp_path / "own"
    text.mkdir()
    write_text(text, {"train": 20, "valid": 4})
    run = Run(text, tmp_path / "run", ("training.max_updates=2",))
    run.train()
    with (text / "valid.src").open("a") as source, (text / "valid.trg").open("a") as target:
        source.write("a b\n")
        target.write("B A\n")
    longer = Run(text, tmp_path / "run", ("training.max_updates=4",))
    with pytest.raises(InputError, match="began with other text"):
        longer.train()
    assert longer.train(resume_with_changes=True).update == 4
    assert "resuming with changed text" in longer.said()


def test_text_of_the_same_counts_and_time_is_other_text(tmp_path: Path) -> None:
    text = tmp_path / "own"
    text.mkdir()
    write_text(text, {"train": 20, "valid": 4})
    Run(text, tmp_path / "run", ("training.max_updates=2",)).train()
    file = text / "train.trg"
    before, status = file.read_text(), file.stat()
    file.write_text("".join(reversed(before.splitlines(keepends=True))))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    longer = Run(text, tmp_path / "run", ("training.max_updates=4",))
    with pytest.raises(InputError, match="began with other text"):
        longer.train()
    file.write_text(before)
    assert longer.train().update == 4


def test_a_state_of_an_earlier_version_knows_its_text(tmp_path: Path) -> None:
    """Its fingerprint is of the text alone, and it lacks a field, and has that of an option that left."""
    write_text(tmp_path, {"train": 20, "valid": 4})
    (tmp_path / "train.w").write_text("0.5\n" * 20)

    def make_run(*overrides: str) -> Run:
        return Run(tmp_path, tmp_path / "run", ("data.weights=w", *overrides))

    run = make_run("training.max_updates=2")
    run.train()
    file = run.folder.state(Commit(2, True)) / "state.json"
    state = json.loads(file.read_text())
    of_text = _checksum_of(run.prepared(), _TEXT)
    assert state["text"] != of_text
    assert state.pop("best_regular") == state["best_update"]

    def write_state(text: str) -> None:
        content = json.dumps({**state, "savings": [], "text": text}).encode()
        file.write_bytes(content)
        (file.parent / "SHA256SUMS").write_text(f"{hashlib.sha256(content).hexdigest()}  state.json\n")

    write_state("0" * 64)
    longer = make_run("training.max_updates=4")
    with pytest.raises(InputError, match="began with other text"):
        longer.train()
    write_state(of_text)
    longer.train()
    assert "instead of" not in longer.said()
    found = json.loads((run.folder.state(Commit(4, True)) / "state.json").read_text())
    assert found["text"] not in (of_text, "0" * 64)


def test_going_on_with_other_threads_or_versions_is_said(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("training.max_updates=2").train()
    same = make_run("training.max_updates=4")
    same.train()
    assert "instead of" not in same.said()
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    monkeypatch.setattr("econmt.__version__", "99.1")
    monkeypatch.setattr(torch, "__version__", "98.2.0")
    other = make_run("training.max_updates=6")
    other.train()
    now, before = (
        "econmt 99.1 instead of ",
        f"threads {threads + 1} instead of {threads}: parameters will differ by rounding",
    )
    assert f"resuming with {now}" in other.said()
    assert "torch 98.2.0 instead of " in other.said()
    assert before in other.said()
    again = make_run("training.max_updates=8")
    again.train()
    assert "instead of" not in again.said()


def test_a_recipe_with_comments_keeps_them(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=2")
    run.train()
    commented = "# why this run was made\n" + run.folder.recipe.read_text()
    run.folder.recipe.write_text(commented)
    run.train()
    assert run.folder.recipe.read_text() == commented
    make_run("training.max_updates=4").train()
    assert "max_updates: 4" in run.folder.recipe.read_text()


def test_another_vocabulary_is_refused_and_the_old_one_stays(make_run: MakeRun, tmp_path: Path) -> None:
    text = tmp_path / "own"
    text.mkdir()
    write_text(text, {"train": 20, "valid": 4})
    run = Run(text, tmp_path / "run", ("training.max_updates=2",))
    run.train()
    before = (run.folder.path / "vocab.source.txt").read_bytes()
    (text / "train.src").write_text((text / "train.src").read_text().replace("a", "neu"))
    longer = Run(text, tmp_path / "run", ("training.max_updates=4",))
    with pytest.raises(InputError, match="the run began with another vocabulary than the prepared text has"):
        longer.train(resume_with_changes=True)
    assert (run.folder.path / "vocab.source.txt").read_bytes() == before


def test_overwriting_starts_anew(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=4")
    go(run)
    other = make_run("training.max_updates=2", "training.seed=9")
    outcome = run_recipe(other.recipe, [run.text], console=other.console, overwrite_output=True)
    assert outcome.training.update == 2
    fresh = make_run("training.max_updates=2", "training.seed=9", name="fresh")
    fresh.train()
    found = {name: value for name, value in snapshot(run.folder).items() if name != "hypotheses.test"}
    assert found == snapshot(fresh.folder)


def test_two_processes_cannot_train_in_one_folder(make_run: MakeRun) -> None:
    run = make_run()
    run.folder.create()
    with run.folder.locked(), pytest.raises(InputError, match="another process is training in this folder"):
        go(run)
    with run.folder.locked():
        pass


def test_checkpoints_without_a_recipe_are_not_guessed_at(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=2")
    run.train()
    run.folder.recipe.unlink()
    with pytest.raises(InputError, match="holds checkpoints but no recipe"):
        run.train()


def test_a_folder_that_cannot_be_made(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = make_run(f"output={tmp_path}/file/run")
    with pytest.raises(InputError, match=r"file/run: the model folder cannot be written \(Not a directory\)"):
        go(run)


def test_figures_of_a_row_add_up(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=8")
    run.train()
    rows = metrics(run.folder)
    assert [row["update"] for row in rows] == [2, 4, 6, 8]
    lengths = prepare(run.recipe, run.text / "prepared", [run.text], show_progress=False).train.target_lengths
    assert rows[-1]["target_tokens"] == int(lengths.sum()) + len(lengths)  # eight batches are an epoch
    assert rows[-1]["epoch"] == 1
    for earlier, later in pairwise(rows):
        assert later["seconds"] > earlier["seconds"]
        assert later["target_tokens"] > earlier["target_tokens"]
    assert all(math.isfinite(value) and value >= 0 for row in rows for value in row.values())
    assert all(row["peak_memory_bytes"] > 1e7 for row in rows)


def test_validation_pairs_that_are_too_long_are_told_of(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_run("training.max_updates=2", name="whole")
    whole.train()
    run = make_run("training.max_updates=2", "decoding.max_input_length=4", name="cut")
    run.train()
    assert (
        "validation pairs have more tokens than decoding.max_input_length 4: perplexity leaves" in run.said()
    )
    assert "max_input_length" not in whole.said()
    short = make_run("training.max_updates=2", "data.max_length=4", name="short")
    short.train()
    assert (
        "validation pairs have more tokens than data.max_length 4: training leaves such pairs" in short.said()
    )
    assert "data.max_length" not in whole.said()
    assert metrics(run.folder)[-1]["valid_perplexity"] != metrics(whole.folder)[-1]["valid_perplexity"]
    monkeypatch.setattr(validation, "longer_than", lambda store, _: np.ones(len(store), dtype=bool))
    with pytest.raises(InputError, match="no pair remains for validation"):
        make_run(name="none").train()


def test_a_run_keeps_the_precision_it_began_with(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "LEAST_SIZE", 1)
    monkeypatch.setattr(precision, "time_products", lambda: ProductTimes(2e-3, 1e-3))
    whole = make_run(name="whole")
    whole.train()
    assert "precision: bfloat16 (auto: a matrix product takes 2.00 ms" in whole.folder.log.read_text()
    make_run("training.max_updates=4", name="parts").train()
    # The machine was busy, or is another one: the run goes on as it began all the same, bit for bit.
    monkeypatch.setattr(precision, "time_products", lambda: ProductTimes(1.2e-3, 1e-3))
    parts = make_run(name="parts")
    parts.train()
    assert "precision: bfloat16 (as at the beginning of the run)" in parts.folder.log.read_text()
    assert snapshot(parts.folder) == snapshot(whole.folder)
    other = make_run(name="other")
    other.train()
    assert snapshot(other.folder) != snapshot(whole.folder)
