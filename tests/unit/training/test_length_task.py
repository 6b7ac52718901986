"""The length-ratio task in runs from their beginning to translations."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import econmt
from econmt.checkpoint.checkpoints import load_model
from econmt.checkpoint.tensor_files import read_tensors
from econmt.data.batching.batches import Batch
from econmt.errors import InputError
from econmt.export.runtime import export_runtime
from econmt.model import TranslationModel
from econmt.training.validation import length_loss, perplexity
from tests.unit.training.tiny import Run, metrics, snapshot

MakeRun = Callable[..., Run]

TASK = ("model.length_task=ratio", "model.length_task_layers=2", "training.length_task_weight=2.0")
LEARNED = "decoding.brevity_penalty_type=learned"


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of which a and b are three tokens in the target, and all other letters one."""
    folder = tmp_path_factory.mktemp("unequal")
    draw = random.Random(2)
    for name, count in {"train": 200, "valid": 30}.items():
        lines = [[draw.choice("abcd") for _ in range(draw.randint(1, 5))] for _ in range(count)]
        (folder / f"{name}.src").write_text("".join(" ".join(line) + "\n" for line in lines))
        texts = [" ".join(letter.upper() * (3 if letter in "ab" else 1) for letter in line) for line in lines]
        spaced = [" ".join(text.replace(" ", "")) for text in texts]
        (folder / f"{name}.trg").write_text("".join(line + "\n" for line in spaced))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("task", [pytest.param("length", marks=pytest.mark.thorough), "ratio"])
def test_lengths_are_learnt_and_wanted(unequal: Path, tmp_path: Path, task: str) -> None:
    """A model that has learnt lengths well and words badly, whose translations are too short."""
    run = Run(
        unequal,
        tmp_path / "run",
        (
            f"model.length_task={task}",
            "model.dropout=0.0",
            "model.encoder.size=16",
            "training.batch.size=20",
            "training.max_updates=100",
            "training.checkpoint_interval=50",
            "training.decode_and_evaluate=0",
        ),
    )
    run.train()
    first, last = metrics(run.folder)
    assert "length loss" in run.said()
    # The ratios differ by 0.5 from their mean; of a length of eight tokens half the deviance is then about 0.2.
    assert last["valid_length_loss"] < (0.05 if task == "ratio" else 0.2)
    assert last["valid_length_loss"] < 0.5 * first["valid_length_loss"]
    lines = (unequal / "valid.src").read_text().splitlines()
    wanted = [len(line.split()) for line in (unequal / "valid.trg").read_text().splitlines()]
    model = econmt.load(run.folder.path, device="cpu")

    def error(**options: object) -> int:
        found = model.translate(lines, beam_size=5, length_penalty_alpha=0.0, **options)  # type: ignore[arg-type]
        return sum(max(0, length - len(each.tokens)) for each, length in zip(found, wanted, strict=True))

    missing = error()
    assert missing > 10
    assert error(brevity_penalty_type="learned", brevity_penalty_weight=50.0) < 0.5 * missing
    assert error(brevity_penalty_type="none") == missing


def test_a_run_with_it_goes_on(make_run: MakeRun) -> None:
    """Bit for bit, with a learned penalty in validation, and its figure in metrics.tsv."""
    keys = (*TASK, LEARNED, "decoding.brevity_penalty_weight=1.0")
    whole, parts = make_run(*keys, name="whole"), make_run(*keys, name="parts")
    whole.train()
    make_run(*keys, "training.max_updates=4", name="parts").train()
    parts.train()
    assert snapshot(whole.folder) == snapshot(parts.folder)
    assert len({row["valid_length_loss"] for row in metrics(whole.folder)}) == 4


def test_validation_measures_it_and_leaves_the_perplexity_alone(make_run: MakeRun) -> None:
    trainer = make_run(*TASK, "model.dropout=0.0").trainer()
    model, task, how = trainer.model, trainer.task, trainer.step.implementations
    assert isinstance(model, TranslationModel)
    total = added = nats = tokens = 0.0
    with torch.no_grad():
        for batch in task.evaluation(trainer.prepared, "valid").batches:
            assert isinstance(batch, Batch)
            encoded = model.encode(batch.source, batch.source_lengths)
            wrong = encoded.length_ratios - batch.target_lengths / batch.source_lengths
            total += float((batch.target_lengths * wrong**2).sum())
            tokens += batch.target_tokens
            plain = float(task.loss(model.eval(), batch, how))
            nats += plain
            added += float(task.loss(model.train(), batch, how)) - plain
    model.eval()
    found = length_loss(trainer.step, task.evaluation(trainer.prepared, "valid"))
    assert found == pytest.approx(total / tokens, rel=1e-5)
    assert added == pytest.approx(2.0 * total, rel=1e-4)
    value = perplexity(trainer.step, task.evaluation(trainer.prepared, "valid"))
    assert value == pytest.approx(math.exp(nats / tokens), rel=1e-5)


@pytest.mark.thorough
def test_memory_options_change_no_gradient(make_run: MakeRun) -> None:
    """Also that of micro-batches."""
    gradients = []
    for number, key in enumerate(("ops.stash=outputs", "ops.stash=gates", "training.memory_budget=120kB")):
        trainer = make_run(*TASK, key, "model.dropout=0.0", name=f"run{number}").trainer()
        trainer.gradient([next(trainer.batches)])
        grown = {name: part.grad for name, part in trainer.parameters.items()}
        gradients.append({name: grad.to_dense() for name, grad in grown.items() if grad is not None})
    for each in gradients[1:]:
        assert each.keys() == gradients[0].keys()
        for name, value in each.items():
            torch.testing.assert_close(value, gradients[0][name], rtol=1e-4, atol=1e-6)


def test_a_model_without_lengths_learns_them_later(make_run: MakeRun) -> None:
    short = ("training.max_updates=2", "training.decode_and_evaluate=0")
    first = make_run(*short, name="first")
    first.train()
    run = make_run(
        *TASK,
        *short,
        f"training.initialize_from={first.folder.path}",
        r"training.fixed_param_names=['(?!length_ratio).*']",
        name="tuned",
    )
    run.train()
    before, _ = read_tensors(first.folder.best)
    after, _ = read_tensors(run.folder.best)
    assert {name for name in after if name.startswith("length_ratio.")} == set(after) - set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    trained, plain = econmt.load(run.folder.path, device="cpu"), econmt.load(first.folder.path, device="cpu")
    learned = {"brevity_penalty_type": "learned", "brevity_penalty_weight": 1.0}
    assert trained.translate(["a b"], **learned)[0].hypotheses
    for models in (plain, econmt.load([run.folder.path, first.folder.path], device="cpu")):
        with pytest.raises(InputError, match="the model 'reverse' predicts no lengths"):
            models.translate(["a b"], **learned)
    ensemble = econmt.load([run.folder.path] * 2, device="cpu")
    assert ensemble.translate(["a b"], **learned)[0].hypotheses
    assert load_model(run.folder.path).recipe.translation_model.length_task == "ratio"
    with pytest.raises(InputError, match="weight above 0, for example 1; type none turns it off"):
        trained.translate(["a b"], brevity_penalty_type="learned")
    for given, message in (
        (
            {"brevity_penalty_type": "none", "brevity_penalty_weight": 1.0},
            "has no effect with brevity_penalty_type none",
        ),
        (
            {**learned, "brevity_penalty_constant_length_ratio": 1.3},
            "has no effect with brevity_penalty_type learned",
        ),
        ({**learned, "sample": 0}, "cannot be combined with sample; remove one of them"),
        ({"coverage_penalty_weight": 1.0, "sample": 0}, "cannot be combined with sample; remove one of them"),
    ):
        with pytest.raises(InputError, match=message):
            trained.translate(["a b"], **given)


def test_lengths_alone_are_learnt_until_they_stall_and_begin_anew_in_another_network(
    make_run: MakeRun,
) -> None:
    """Perplexity, which does not move, would take the first checkpoint for the best."""
    short = ("training.decode_and_evaluate=0", "training.checkpoint_interval=2")
    first = make_run(*TASK, *short, "training.max_updates=2", name="first")
    first.train()
    alone = r"training.fixed_param_names=['(?!length_ratio).*']"
    start = f"training.initialize_from={first.folder.path}"
    metric = "training.early_stopping.metric=length_loss"
    run = make_run(*TASK, *short, start, alone, metric, "training.max_updates=8", name="tuned")
    result = run.train()
    rows = {int(row["update"]): row for row in metrics(run.folder)}
    assert len({row["valid_perplexity"] for row in rows.values()}) == 1
    assert result.best_update == min(rows, key=lambda update: rows[update]["valid_length_loss"]) > 2
    for keys in ((), ("model.length_task=ratio", "model.length_task_layers=1")):
        other = make_run(*keys, *short, start, "training.max_updates=2", name=f"other{len(keys)}")
        other.train()
        assert any("length_ratio." in name for name in read_tensors(other.folder.best)[0]) == bool(keys)


def test_what_does_not_go_together_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    for keys, message in {
        (
            LEARNED,
            "decoding.brevity_penalty_weight=1.0",
        ): "decoding.brevity_penalty_type learned needs model.length_task: ratio or length",
        (*TASK, LEARNED): "learned needs brevity_penalty_weight above 0, for example 1",
        (
            *TASK,
            "parallel.pipeline=2",
            "model.encoder.layers=2",
        ): "parallel.pipeline 2 cannot be combined with model.length_task ratio",
        ("training.length_task_weight=0.0",): "training.length_task_weight",
        ("training.length_task_weight=2.0",): "training.length_task_weight needs model.length_task",
        ("model.length_task_layers=2",): "model.length_task_layers needs model.length_task",
        ("training.early_stopping.metric=length_loss",): "metric length_loss needs model.length_task",
        (
            *TASK,
            "decoding.brevity_penalty_type=none",
            "decoding.brevity_penalty_weight=1.0",
        ): "needs decoding.brevity_penalty_type: constant or learned",
    }.items():
        with pytest.raises(InputError, match=re.escape(message)):
            make_run(*keys)
    short = ("training.max_updates=1", "training.decode_and_evaluate=0")
    run = make_run(*TASK, LEARNED, "decoding.brevity_penalty_weight=1.0", *short)
    run.train()
    with pytest.raises(
        InputError, match="its search has penalties or pruning, which the runtime does not support"
    ):
        export_runtime(run.folder.path, tmp_path / "runtime")
