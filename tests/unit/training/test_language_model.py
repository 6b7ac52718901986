"""A run of a language model: learnt, resumed, averaged, evaluated, accounted for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from econmt.checkpoint.checkpoints import load_task
from econmt.config.recipe import load_recipe, shipped_recipes
from econmt.data.batching.text_batches import whole_text
from econmt.decoding.text_reader import TextReader
from econmt.engine.graphs import GraphedStep
from econmt.engine.measurement import measure_step
from econmt.engine.step import TrainingStep
from econmt.estimate.training_step import estimate_step
from econmt.model import Implementations
from econmt.model.language_model import LanguageModel
from econmt.tasks import language_model
from econmt.tasks.language_model import LanguageModelTask
from econmt.tasks.protocol import Shape
from econmt.training.progress import Progress
from econmt.training.results import make_results
from econmt.training.validation import perplexity
from tests.unit.engine.fake_cuda import use_fake_cuda
from tests.unit.engine.toy import assert_same_bits, parameters
from tests.unit.training.conftest import UseRows
from tests.unit.training.tiny import assert_parts_are_the_whole, metrics, snapshot
from tests.unit.training.tiny_text import TextRun, write_lines

MakeRun = Callable[..., TextRun]
CPU = torch.device("cpu")
NO_DROPOUT = "model.dropout=0.0"
JITTER = "training.bptt_jitter=true"
NON_MONOTONE = "training.averaging={start: non-monotone, non_monotone_interval: 1}"
AT_ONCE = "training.averaging={start: at-once}"
PENALTIES = ("training.activation_regularization=2.0", "training.temporal_activation_regularization=1.0")
RECOMPUTE = Implementations.everywhere("recompute")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("text"), {"train": 60, "valid": 12, "test": 8})


@pytest.fixture
def make_run(text: Path, tmp_path: Path) -> MakeRun:
    return lambda *overrides, name="run": TextRun(text, tmp_path / name, overrides)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "overrides",
    [
        (JITTER, NON_MONOTONE, "model.size=[9, 6]", *PENALTIES),
        (AT_ONCE, "training.optimizer={name: sgd, learning_rate: 1.0, momentum: 0.5}"),
        ("training.schedule={name: plateau-reduce, reduce_num_not_improved: 1}",),
        ("model.cell=qrnn2", "model.size=[9, 6]", "model.dropout.weights=0.0", JITTER),
        ("training.precision=float16", f"training.loss_scale={2**24}", "training.loss_scale_window=3"),
    ],
)
def test_a_run_in_parts_is_the_run_that_never_stopped(make_run: MakeRun, overrides: tuple[str, ...]) -> None:
    # Learning rates so high that validation does not always improve.
    rest = ("training.optimizer.learning_rate=30.0", *overrides)
    whole = assert_parts_are_the_whole(make_run, *rest, ends=(4, 16, 24))
    if "non-monotone" in "".join(overrides):
        state = whole.trainer().state
        assert state.average_from is not None
        assert state.average_from < 24


def test_where_a_part_of_a_run_ends_does_not_decide_on_averaging(make_run: MakeRun) -> None:
    """Where it ends when averaging begins, it goes on with its parameters: the mean has no values yet."""
    rest = ("training.optimizer.learning_rate=30.0", NON_MONOTONE)
    whole = make_run(*rest, "training.max_updates=32", name="whole").trained()
    begins = whole.trainer().state.average_from
    assert begins is not None
    for name, ends in (("parts", (3, 9, 18, 23, 32)), ("there", (begins, 32))):
        for updates in ends:
            run = make_run(*rest, f"training.max_updates={updates}", name=name).trained()
        state = run.trainer().state
        assert state.average_from == begins
        assert {row["update"] for row in state.metrics} >= {*ends}
    assert snapshot(run.folder) == snapshot(whole.folder)


def test_validation_results_and_score_agree(make_run: MakeRun, text: Path) -> None:
    run = make_run("training.max_updates=8", "model.dropout=0.1").trained()
    results = make_results(run.context())
    best = next(row for row in metrics(run.folder) if row["update"] == results.best_update)
    assert results.perplexities["valid"] == pytest.approx(best["valid_perplexity"], rel=1e-6)
    loaded = load_task(run.folder.path)
    assert isinstance(loaded.model, LanguageModel)
    for split in ("valid", "test"):
        lines = (text / f"{split}.txt").read_text().split("\n")[:-1]
        reader = TextReader(loaded.model, loaded.vocabularies.target, CPU, torch.float32)
        # In two parts: what has been read is remembered.
        scored = [*reader.score(lines[:5]), *reader.score(lines[5:])]
        words = sum(len(line.split()) + 1 for line in lines)
        assert words == sum(line.words for line in scored)
        nats = -math.fsum(line.log_probability for line in scored)
        assert math.exp(nats / words) == pytest.approx(results.perplexities[split], rel=1e-5)


def test_perplexity_is_per_word_whatever_the_subwords(make_run: MakeRun, text: Path, tmp_path: Path) -> None:
    run = make_run("data.subwords={type: bpe, size: 16}", f"data.prepared={tmp_path / 'subwords'}")
    trainer = run.trainer()
    prepared_text = run.prepared()
    trainer.model.eval()
    found = trainer.task.evaluation(prepared_text, "valid")
    words = sum(len(line.split()) + 1 for line in (text / "valid.txt").read_text().split("\n")[:-1])
    assert found.words == words
    assert prepared_text.valid.total_tokens > words
    (window,) = whole_text(prepared_text.valid, 1, 10_000)
    nats = trainer.task.loss(trainer.model, window, Implementations()).detach()
    assert perplexity(trainer.step, found) == pytest.approx(math.exp(float(nats) / words), rel=1e-5)


@pytest.mark.parametrize(
    ("size", "bptt", "rows", "expected"),
    [
        *((3, 5, 1, 15), (3, 5, 2, 7), (3, 5, 15, 1), (3, 5, 16, 1)),
        *((40, 30, 1, 1024), (40, 30, 3, 341), (32, 32, 4, 256)),
    ],
)
def test_windows_of_validation_are_no_larger_than_a_batch(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, size: int, bptt: int, rows: int, expected: int
) -> None:
    monkeypatch.setattr(language_model, "whole_text", lambda store, *sizes: sizes)
    run = make_run(f"training.batch.size={size}", f"training.bptt={bptt}", f"training.valid_rows={rows}")
    task, prepared = LanguageModelTask(run.recipe, 12), run.prepared()
    assert task.evaluation(prepared, "valid").batches == (rows, expected, 0)
    # A final figure has rows of at least 4,000 tokens, at most 32, which read 1,000 tokens first.
    for tokens, exact_rows in ((3_999, 1), (8_000, 2), (11_999, 2), (400_000, 32)):
        store: Any = SimpleNamespace(total_tokens=tokens)
        asked = task.evaluation(prepared._replace(valid=store), "valid", exact=True).batches
        assert asked == (exact_rows, max(1, min(size * bptt, 1024) // exact_rows), 1_000)


def test_steps_in_graphs_carry_the_state_too(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_cuda(monkeypatch)
    clipping = "training.gradient_clipping={type: value, threshold: 0.01}"
    outcomes = []
    for graphed in (False, True):
        trainer = make_run(NO_DROPOUT, clipping, name=f"run{graphed}").trainer()
        step = TrainingStep(trainer.task, trainer.model.train(), implementations=RECOMPUTE)
        step.optimizer.set_learning_rate(0.5)
        notes: list[str] = []
        run = GraphedStep(step, note=notes.append) if graphed else step
        # All lengths of an epoch, and the beginning of the next, with a window once with other rows.
        batches = [next(trainer.batches) for _ in range(trainer.batches.batches_per_epoch + 1)]
        losses = [float(run([batch]).loss) for batch in batches]
        assert not notes
        outcomes.append((losses, parameters(step.model), step.carried()))
        if graphed:
            assert run.captured == 2
    (losses, found, carried), (losses_graphed, found_graphed, carried_graphed) = outcomes
    assert losses == losses_graphed
    assert_same_bits(found_graphed, found)
    assert_same_bits(carried_graphed, carried)


def test_micro_batches_by_rows_carry_their_own_states(make_run: MakeRun) -> None:
    trainer = make_run(NO_DROPOUT, "training.valid_rows=5").trainer()
    step = TrainingStep(trainer.task, trainer.model.train())
    batches = [next(trainer.batches) for _ in range(3)]
    carried = step.carried()
    whole = [step.gradient([batch], step.tokens([batch])).loss for batch in batches]
    after = step.carried()
    assert not any(value.equal(after[name]) for name, value in carried.items()), "copies"
    step.set_carried(carried)
    parts = [step.gradient(batch.split(2), step.tokens([batch])).loss for batch in batches]
    torch.testing.assert_close(torch.stack(parts), torch.stack(whole))
    torch.testing.assert_close(step.carried(), after)
    step.model.eval()
    plan: Any = SimpleNamespace(find=lambda _: SimpleNamespace(rows=2, implementations=RECOMPUTE))
    texts = [trainer.task.evaluation(trainer.prepared, "valid") for _ in range(2)]
    assert perplexity(step, texts[0], plan=plan) == pytest.approx(perplexity(step, texts[1]))


@pytest.mark.parametrize(
    "name", [name for name in shipped_recipes() if load_recipe(name).task == "language_model"]
)
def test_the_estimate_of_a_shipped_recipe_agrees_with_the_ledger(name: str) -> None:
    recipe = load_recipe(name, ["model.size=64", "model.embedding=48", "training.precision=float32"])
    task = LanguageModelTask(recipe, 3000)
    step = TrainingStep(task, task.build_model().train())
    shape = Shape(3, 1, 5)
    measured = measure_step(step, task.example(shape), timed=False)
    estimated = estimate_step(task, shape)
    assert estimated.peak == pytest.approx(measured.peak, rel=0.02)
    assert estimated.category("optimizer state") == measured.category("optimizer state")
    assert (recipe.training.averaging.start != "never") == (measured.category("optimizer state") > 0)


@pytest.mark.cuda
@pytest.mark.parametrize("jitter", ["true", "false"])
def test_on_a_gpu_graphs_learn_what_launched_steps_learn(make_run: MakeRun, jitter: str) -> None:
    rest = ("training.device=cuda", "training.precision=float32", f"training.bptt_jitter={jitter}")
    found = {}
    for graphs in ("off", "auto"):
        run = make_run(*rest, f"training.cuda_graphs={graphs}", name=graphs).trained()
        found[graphs] = metrics(run.folder)[-1]
        assert "no CUDA graph" not in run.console.file.getvalue()  # type: ignore[attr-defined]
    for key in ("valid_perplexity", "train_loss", "gradient_norm"):
        assert found["auto"][key] == pytest.approx(found["off"][key], rel=1e-3)


def test_the_state_goes_on_from_before_a_trial_and_a_step_that_is_repeated(
    make_run: MakeRun, use_rows: UseRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_rows(3)
    trainer = make_run("training.memory_budget=1GiB").trainer()
    trainer._update(Progress.silent())
    carried = {name: value.clone() for name, value in trainer.step.carried().items()}
    trainer.rehearse()
    assert_same_bits(trainer.step.carried(), carried)
    seen, real = list[bool](), trainer.step.gradient

    def full(*given: Any, **how: Any) -> Any:
        seen.append(all(map(torch.equal, trainer.step.carried().values(), carried.values())))
        result = real(*given, **how)
        if len(seen) == 1:
            raise torch.OutOfMemoryError("full")
        return result

    monkeypatch.setattr(trainer.step, "gradient", full)
    trainer.gradient([next(trainer.batches)])
    assert seen == [True, True]
