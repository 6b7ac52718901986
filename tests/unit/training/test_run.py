from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from econmt.checkpoint.checkpoints import load_state
from econmt.checkpoint.folder import Commit, ModelFolder
from econmt.engine import precision
from econmt.engine.precision import ProductTimes
from econmt.errors import InputError
from econmt.evaluation.metrics import Tokenizer
from econmt.training import validation
from econmt.training.context import _TEXT, _checksum_of
from econmt.training.interrupts import Interrupted, Interrupts
from econmt.training.run import Outcome, run_recipe
from econmt.training.trainer import Trainer
from tests.unit.training.tiny import MakeRun, Run, metrics, script, snapshot, write_text


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
    assert len(run.folder.numbered_parameters()) == run.folder.metrics.exists() == (update > 1)
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


def go(run: Run, **keywords: bool) -> Outcome:
    return run_recipe(run.recipe, [run.text], console=run.console, **keywords)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A text that a test may change."""
    write_text(tmp_path / "own", {"train": 20, "valid": 4})
    return tmp_path / "own"


def run_of(own: Path, updates: int) -> Run:
    return Run(own, own.parent / "run", (f"training.max_updates={updates}",))


def test_a_finished_run_is_left_alone_and_goes_on_with_a_higher_limit(make_run: MakeRun, whole: Run) -> None:
    run = make_run("training.max_updates=4")
    assert go(run).results is not None
    before = contents(run.folder)
    again = go(run)
    assert (again.results, again.training.reason) == (None, "max_updates 4 reached")
    assert contents(run.folder) == before
    longer = make_run("training.max_updates=8")
    assert go(longer).training.update == 8
    assert snapshot(longer.folder) == snapshot(whole.folder)


@pytest.mark.usefixtures("pictures")
def test_results_that_a_crash_prevented_are_made_by_the_next_run(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(f"data.test={make_run().text}/test", "training.max_updates=2")
    go(run)
    before = run.folder.test_hypotheses.read_text()
    assert len(before.splitlines()) == 4
    run.folder.results.unlink()
    run.folder.test_hypotheses.unlink()
    results = go(run).results
    assert (results.corpus, len(results.samples)) == ("test", 3)
    assert run.folder.test_hypotheses.read_text() == before
    assert [path.name for path in results.pictures] == ["learning_curve.png", "attention.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in results.pictures)
    other = make_run(f"data.test={run.text}/valid", "training.max_updates=2")
    monkeypatch.setattr("econmt.evaluation.metrics.tokenizer_of", lambda _: Tokenizer("char"))
    assert "|tok:13a|" in go(other).results.signature, "other text is evaluated anew, as checkpoints were"
    assert run.folder.test_hypotheses.read_text() != before
    weights, state = (results.ledger.category(name) for name in ("weights", "optimizer state"))
    assert 0 < 2 * weights == pytest.approx(state, rel=0.05)


def test_keys_that_change_what_is_learnt_are_refused_and_listed(make_run: MakeRun) -> None:
    make_run("training.max_updates=2").train()
    changes = ("model.dropout=0.1", "training.optimizer.betas=[0.5, 0.9]", "training.label_smoothing=0.1")
    run = make_run("training.max_updates=3", *changes)
    with pytest.raises(InputError) as caught:
        run.train()
    message = str(caught.value)
    for words in (
        f"{run.folder.path}: was trained with another recipe: model.dropout 0.2 -> 0.1; ",
        "training.optimizer.betas (0.9, 0.999) -> (0.5, 0.9)",
        "training.label_smoothing 0.0 -> 0.1",
        "--resume-with-changes",
        "--overwrite-output",
    ):
        assert words in message
    assert "max_updates" not in message
    assert run.train(resume_with_changes=True).update == 3
    assert "resuming with a changed recipe: model.dropout 0.2 -> 0.1" in run.said()
    run.train()  # the folder has the new recipe now


def test_a_run_that_is_refused_is_left_as_it_was(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, 3.0, 4.0, 4.0)
    plateau = "training.schedule.name=plateau-reduce"
    make_run(plateau, "training.max_updates=6", "training.keep_last_params=3").train()
    run = make_run("training.max_updates=8", "training.keep_last_params=1")
    before = contents(run.folder)
    with pytest.raises(InputError, match=r"schedule\.name plateau-reduce -"):
        run.train()
    assert contents(run.folder) == before


def test_overwriting_with_what_cannot_be_used_keeps_the_old_run(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=2").trained()
    before = snapshot(run.folder)
    for key, message in (
        ("data.train=[nowhere]", "nowhere"),
        ("training.param_dtype=bfloat16", "param_dtype: bfloat16 cannot be combined with .* float32"),
        (
            "training.memory_budget=25KiB",
            r"^training\.memory_budget 25 KiB: one sentence of the worst bucket",
        ),
    ):
        with pytest.raises(InputError, match=message):
            go(make_run(key, "training.precision=auto"), overwrite_output=True)
        assert snapshot(run.folder) == before


def test_another_optimizer_starts_with_a_fresh_state(make_run: MakeRun) -> None:
    make_run("training.max_updates=2").train()
    run = make_run("training.max_updates=4", "training.optimizer.name=sgd")
    run.train(resume_with_changes=True)
    assert "the saved optimizer is adam; its state is not used" in run.said()
    assert run.trainer().optimizer.state == {}


def test_changed_text_of_the_same_counts_and_time_or_not_is_refused(own: Path) -> None:
    run_of(own, 2).train()
    file = own / "train.trg"
    before, status = file.read_text(), file.stat()
    file.write_text("".join(reversed(before.splitlines(keepends=True))))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    longer = run_of(own, 4)
    with pytest.raises(InputError, match="began with other text"):
        longer.train()
    file.write_text(before)
    assert run_of(own, 3).train().update == 3
    for suffix, line in (("src", "a b"), ("trg", "B A")):
        with (own / f"valid.{suffix}").open("a") as more:
            more.write(f"{line}\n")
    with pytest.raises(InputError, match="began with other text"):
        longer.train()
    assert longer.train(resume_with_changes=True).update == 4
    assert "resuming with changed text" in longer.said()


def test_a_state_of_an_earlier_version_knows_its_text(own: Path) -> None:
    """Its fingerprint is of the text alone, and it lacks a field, and has that of an option that left."""
    (own / "train.w").write_text("0.5\n" * 20)

    def make_run(updates: int) -> Run:
        return Run(own, own / "run", ("data.weights=w", f"training.max_updates={updates}"))

    run = make_run(2).trained()
    file = run.folder.state(Commit(2, True)) / "state.json"
    state = json.loads(file.read_text())
    of_text = _checksum_of(run.prepared(), _TEXT)
    assert state["text"] != of_text
    assert state.pop("best_regular") == state["best_update"]
    del state["environment"]["threads"]

    def write_state(text: str) -> None:
        content = json.dumps({**state, "savings": [], "text": text}).encode()
        file.write_bytes(content)
        (file.parent / "SHA256SUMS").write_text(f"{hashlib.sha256(content).hexdigest()}  state.json\n")

    write_state("0" * 64)
    longer = make_run(4)
    with pytest.raises(InputError, match="began with other text"):
        longer.train()
    write_state(of_text)
    assert load_state(run.folder, Commit(2, True)).best_regular == state["best_update"]
    longer.train()
    assert "instead of" not in longer.said()
    found = json.loads((run.folder.state(Commit(4, True)) / "state.json").read_text())
    assert found["text"] not in (of_text, "0" * 64)


def test_going_on_with_other_threads_or_versions_is_said(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("training.max_updates=2").train()
    same = make_run("training.max_updates=4").trained()
    assert "instead of" not in same.said()
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    monkeypatch.setattr("econmt.__version__", "99.1")
    monkeypatch.setattr(torch, "__version__", "98.2.0")
    other = make_run("training.max_updates=6").trained()
    for words in (
        "resuming with econmt 99.1 instead of ",
        "torch 98.2.0 instead of ",
        f"threads {threads + 1} instead of {threads}: parameters will differ by rounding",
    ):
        assert words in other.said()
    assert "instead of" not in make_run("training.max_updates=8").trained().said()


def test_a_recipe_with_comments_keeps_them(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=2").trained()
    commented = "# why this run was made\n" + run.folder.recipe.read_text()
    run.folder.recipe.write_text(commented)
    run.train()
    assert run.folder.recipe.read_text() == commented
    make_run("training.max_updates=4").train()
    assert "max_updates: 4" in run.folder.recipe.read_text()


def test_another_vocabulary_is_refused_and_the_old_one_stays(own: Path) -> None:
    vocabulary = run_of(own, 2).trained().folder.path / "vocab.source.txt"
    before = vocabulary.read_bytes()
    (own / "train.src").write_text((own / "train.src").read_text().replace("a", "neu"))
    with pytest.raises(InputError, match="the run began with another vocabulary than the prepared text has"):
        run_of(own, 4).train(resume_with_changes=True)
    assert vocabulary.read_bytes() == before


def test_overwriting_starts_anew(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=4")
    go(run)
    other = make_run("training.max_updates=2", "training.seed=9")
    assert go(other, overwrite_output=True).training.update == 2
    fresh = make_run("training.max_updates=2", "training.seed=9", name="fresh").trained()
    found = {name: value for name, value in snapshot(run.folder).items() if name != "hypotheses.test"}
    assert found == snapshot(fresh.folder)


def test_folders_that_cannot_be_used(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=2")
    run.folder.create()
    with run.folder.locked(), pytest.raises(InputError, match="another process is training in this folder"):
        go(run)
    run.train()
    run.folder.recipe.unlink()
    with pytest.raises(InputError, match="holds checkpoints but no recipe"):
        run.train()


def test_figures_of_a_row_add_up(whole: Run) -> None:
    rows = metrics(whole.folder)
    assert [row["update"] for row in rows] == [2, 4, 6, 8]
    lengths = whole.prepared().train.target_lengths
    assert rows[-1]["target_tokens"] == int(lengths.sum()) + len(lengths)  # eight batches are an epoch
    assert rows[-1]["epoch"] == 1
    assert all(math.isfinite(value) and value >= 0 for row in rows for value in row.values())
    assert all(row["peak_memory_bytes"] > 1e7 for row in rows)


def test_validation_pairs_that_are_too_long_are_told_of(
    make_run: MakeRun, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("training.max_updates=2", "decoding.max_input_length=4", name="cut").trained()
    begin = "validation pairs have more tokens than"
    assert f"{begin} decoding.max_input_length 4: perplexity leaves" in run.said()
    short = make_run("training.max_updates=2", "data.max_length=4", name="short").trained()
    assert f"{begin} data.max_length 4: training leaves such pairs" in short.said()
    assert begin not in whole.said()
    assert metrics(run.folder)[0]["valid_perplexity"] != metrics(whole.folder)[0]["valid_perplexity"]
    monkeypatch.setattr(validation, "longer_than", lambda store, _: np.ones(len(store), dtype=bool))
    with pytest.raises(InputError, match="no pair remains for validation"):
        make_run(name="none").train()


def test_a_run_keeps_the_precision_it_began_with(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "LEAST_SIZE", 1)
    monkeypatch.setattr(precision, "time_products", lambda: ProductTimes(2e-3, 1e-3))
    whole = make_run("training.max_updates=4", name="whole").trained()
    assert "precision: bfloat16 (auto: a matrix product takes 2.00 ms" in whole.folder.log.read_text()
    make_run("training.max_updates=2", name="parts").train()
    # The machine was busy, or is another one: the run goes on as it began all the same, bit for bit.
    monkeypatch.setattr(precision, "time_products", lambda: ProductTimes(1.2e-3, 1e-3))
    parts = make_run("training.max_updates=4", name="parts").trained()
    assert "precision: bfloat16 (as at the beginning of the run)" in parts.folder.log.read_text()
    assert snapshot(parts.folder) == snapshot(whole.folder)
    other = make_run("training.max_updates=4", name="other").trained()
    assert snapshot(other.folder) != snapshot(whole.folder)
