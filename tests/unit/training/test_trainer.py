from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import sacrebleu
import torch
from rich.console import Console

from econmt.checkpoint.state import TrainingState
from econmt.config.optimizer import METRICS
from econmt.config.recipe import EarlyStopping, Training
from econmt.data.batching.batches import Batch, pad_batch
from econmt.engine.step import StepResult
from econmt.errors import TrainingError
from econmt.evaluation.metrics import Score
from econmt.training.decisions import judge_checkpoint
from econmt.training.interrupts import Interrupts
from econmt.training.progress import Figures, Progress
from econmt.training.results import make_results
from econmt.training.run import train
from econmt.training.trainer import Trainer
from econmt.training.update_metrics import UpdateMetrics, not_finite
from econmt.training.validation import Validation, perplexity, validate
from tests.unit.engine.toy import assert_same_bits
from tests.unit.training.tiny import MakeRun, metrics, script, snapshot


def batch_of(trainer: Trainer, indices: Iterable[int], store: Any = None) -> Batch:
    chosen = np.array([*indices])
    source, source_lengths, target, target_lengths = (store or trainer.prepared.train).gather(chosen)
    shape = (int(source_lengths.max()) + 1, int(target_lengths.max()) + 1)
    return pad_batch(chosen, source, source_lengths, target, target_lengths, shape)


def gradients(trainer: Trainer, batches: list[Batch]) -> dict[str, torch.Tensor]:
    trainer.gradient(batches)
    return {name: p.grad.clone() for name, p in trainer.parameters.items() if p.grad is not None}


def test_an_error_in_a_rehearsal_leaves_random_states_as_they_were(make_run: MakeRun) -> None:
    trainer = make_run().trainer()

    def fail() -> None:
        torch.rand(())
        raise KeyboardInterrupt

    torch.manual_seed(3)
    expected = float(torch.rand(()))
    torch.manual_seed(3)
    with pytest.raises(KeyboardInterrupt), trainer._streams_preserved():
        fail()
    assert float(torch.rand(())) == expected


def test_bleu_of_metrics_and_log_is_that_of_sacrebleu_on_the_hypotheses_file(make_run: MakeRun) -> None:
    lengths = "training.max_updates=60", "training.checkpoint_interval=20"
    run = make_run(*lengths, "training.keep_last_params=9", "model.dropout=0.0").trained()
    references = (run.text / "valid.trg").read_text().splitlines()
    scores = []
    for row in metrics(run.folder):
        hypotheses = run.folder.hypotheses(int(row["update"])).read_text().splitlines()
        scores.append(sacrebleu.corpus_bleu(hypotheses, [references]).score)
        assert row["bleu"] == scores[-1]
        assert f"\t{scores[-1]!r}\t" in run.folder.metrics.read_text()
        assert f"BLEU {scores[-1]:.2f}" in run.folder.log.read_text()
    assert max(scores) > 0.0
    metric = sacrebleu.BLEU()
    metric.corpus_score(references, [references])
    assert str(metric.get_signature()) in run.folder.log.read_text()


def test_decode_and_evaluate_bounds_the_sentences_translated(make_run: MakeRun) -> None:
    some = make_run("training.decode_and_evaluate=2", "training.max_updates=2", name="some").trained()
    assert len(some.folder.hypotheses(2).read_text().splitlines()) == 2
    none = make_run("training.decode_and_evaluate=0", "training.max_updates=2", name="none").trained()
    assert not none.folder.hypotheses(2).exists()
    assert math.isnan(metrics(none.folder)[0]["bleu"])


def test_perplexity_is_that_of_the_saved_parameters(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=4").trained()
    trainer = run.trainer()
    model, total, tokens = trainer.model.eval(), 0.0, 0
    for index in range(len(trainer.prepared.valid)):
        one = batch_of(trainer, [index], trainer.prepared.valid)
        hidden = model(one.source, one.source_lengths, one.target_input)
        logits = hidden[0] @ model.output.weight.T + model.output.bias
        total += torch.nn.functional.cross_entropy(logits, one.target_output[0], reduction="sum").item()
        tokens += one.target_tokens
    assert metrics(run.folder)[-1]["valid_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)


def test_figures_of_the_log_are_those_of_the_updates_since_the_last_line(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = "training.max_updates=null", "training.max_epochs=9"
    trainer = make_run("training.update_interval=2", "training.log_interval=3", *limits).trainer()
    trainer.model.train()
    taken: list[tuple[float, float, int]] = []
    real = trainer.gradient

    def gradient(batches: Sequence[Batch], *, updates: bool = False) -> StepResult:
        result = real(batches, updates=updates)
        taken.append((float(result.loss), float(result.norm), sum(b.target_tokens for b in batches)))
        return result

    monkeypatch.setattr(trainer, "gradient", gradient)
    for update, recent in ((1, 1), (2, 2), (3, 3), (4, 1), (5, 2)):
        if update == 3:  # the meter is emptied when its line has been written
            lines: list[Figures] = []
            monkeypatch.setattr(Progress, "updates", lambda _, figures, lines=lines: lines.append(figures))
        trainer._update(Progress.silent())
        figures = lines.pop() if update == 3 else trainer._figures(update)
        losses, norms, tokens = zip(*taken[-recent:], strict=True)
        assert figures.loss == pytest.approx(sum(losses) / sum(tokens), rel=1e-12)
        assert figures.gradient_norm == norms[-1]
        assert figures.learning_rate == trainer.schedule.learning_rate(update)
        assert figures.epoch == 2 * update // trainer.batches.batches_per_epoch
        assert figures.updates == round(9 * trainer.batches.batches_per_epoch / 2)
        assert trainer.state.since_log.tokens == (0 if update == 3 else sum(tokens))
    assert trainer.state.target_tokens == sum(tokens for _, _, tokens in taken)


def test_the_seconds_of_a_run_are_of_all_its_parts_with_validation(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update takes 2 seconds here, and a validation 100."""
    now = [0.0]

    def slow(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            now[0] += seconds
            return function(*arguments, **named)

        return run

    monkeypatch.setattr("econmt.training.trainer.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("econmt.training.trainer.validate", slow(100.0, validate))
    monkeypatch.setattr(Trainer, "gradient", slow(2.0, Trainer.gradient))
    for updates in (3, 6):
        context = make_run("training.log_interval=3", f"training.max_updates={updates}").context()
        train(replace(context, began=now[0]), Console(quiet=True))
        now[0] += 1000.0
    rows = metrics(context.folder)
    assert [(row["update"], row["seconds"]) for row in rows] == [(2, 104), (3, 206), (4, 308), (6, 412)]
    tokens = np.diff([row["target_tokens"] for row in rows], prepend=0.0)
    speeds = [row["target_tokens_per_second"] for row in rows]
    assert speeds == pytest.approx(tokens / [4.0, 2.0, 2.0, 4.0], abs=0.051)


def test_validation_draws_nothing_from_training(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawing(*arguments: object, **named: object) -> Validation:
        random.random()
        np.random.rand()
        torch.rand(3)
        return Validation(2.0, 0.0, "", None)

    monkeypatch.setattr("econmt.training.trainer.validate", drawing)
    often, seldom = (
        make_run(f"training.checkpoint_interval={n}", "training.max_updates=4", name=str(n)).trained()
        for n in (1, 4)
    )
    assert often.folder.parameters(4).read_bytes() == seldom.folder.parameters(4).read_bytes()


def test_loss_that_is_not_finite_stops_before_it_reaches_the_parameters(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=4").trained()
    before = snapshot(run.folder)
    longer = make_run("training.max_updates=9")
    trainer = longer.trainer()
    original = trainer.batches
    pairs: list[int] = []

    class Poisoned:
        """Breaks a parameter just before the update."""

        epoch = 0
        batches_per_epoch = original.batches_per_epoch

        def __next__(self) -> Batch:
            batch = next(original)
            pairs[:] = batch.indices.tolist()
            with torch.no_grad():
                trainer.model.output.bias.fill_(float("nan"))
            return batch

    trainer.batches = Poisoned()  # type: ignore[assignment]
    progress = Progress(longer.folder.log, longer.folder.tensorboard, longer.console, 4)
    weights = {name: p.detach().clone() for name, p in trainer.parameters.items() if name != "output.bias"}
    with pytest.raises(TrainingError) as caught, progress:
        trainer.run(progress, Interrupts())
    message = str(caught.value)
    assert message.startswith("the loss is not finite at update 5, pairs ")
    for words in (*map(trainer.prepared.train.location, pairs), "the last good checkpoint is update 4"):
        assert words in message
    assert "\n" not in message
    for name, value in weights.items():
        assert torch.equal(trainer.parameters[name], value)
    assert snapshot(run.folder) == before


def test_gradient_that_is_not_finite_is_told_apart_and_long_lists_are_cut(make_run: MakeRun) -> None:
    trainer = make_run().trainer()
    reading = UpdateMetrics(3, 1.5, float("inf"), 9, [torch.arange(12).numpy()])
    message = not_finite(reading, trainer.prepared.train, trainer._last_good())
    assert message.startswith("the gradient is not finite at update 3")
    assert "and 4 more; there is no checkpoint yet" in message
    for count, cut in ((8, False), (9, True)):
        few = reading._replace(indices=[torch.arange(count).numpy()])
        assert (" and 1 more" in not_finite(few, trainer.prepared.train, "")) == cut
        assert " and 0 more" not in not_finite(few, trainer.prepared.train, "")


PLATEAU = ("training.schedule={name: plateau-reduce, reduce_factor: 0.5, reduce_num_not_improved: 1}",)


def test_plateau_goes_back_to_the_best_parameters_and_optimizer_state(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, 3.0, 4.0, 3.0)
    run = make_run(*PLATEAU, "training.max_updates=4").trained()
    assert "checkpoint 4: validation perplexity 4.00" in run.said()
    assert "best is checkpoint 2; training returns to it with a reduced learning rate" in run.said()
    trainer = run.trainer()
    assert trainer.state.update == 4
    assert trainer.schedule.learning_rate(5) == pytest.approx(0.01)
    expected = make_run(*PLATEAU, "training.max_updates=2", name="best").trained().trainer()
    for name, parameter in trainer.parameters.items():
        best_parameter = expected.parameters[name]
        assert torch.equal(parameter, best_parameter)
        assert set(trainer.optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
        assert_same_bits(trainer.optimizer.state[parameter], expected.optimizer.state[best_parameter])
    # What was validated at update 4 is kept as it was.
    assert run.folder.parameters(4).read_bytes() != run.folder.parameters(2).read_bytes()


@pytest.mark.parametrize("sgd", [(), ("training.optimizer={name: sgd, momentum: 0.5}",)])
def test_a_plateau_after_a_change_goes_back_to_the_parameters_alone(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, sgd: tuple[str, ...]
) -> None:
    """The best checkpoint has no state, as that of another schedule, or that of another optimizer."""
    script(monkeypatch, 3.0, 4.0, 4.5, 5.0)
    make_run(*(PLATEAU * bool(sgd)), f"training.max_updates={2 if sgd else 6}").train()
    run = make_run(*PLATEAU, *sgd, f"training.max_updates={4 if sgd else 8}")
    run.train(resume_with_changes=True)
    trainer = run.trainer()
    assert trainer.state.parameters_from == 2
    assert run.folder.parameters(2).read_bytes() == run.folder.best.read_bytes()
    states = [state for state in trainer.optimizer.state.values() if state]
    names = {"momentum_buffer"} if sgd else {"step", "exp_avg", "exp_avg_sq"}
    assert {name for state in states for name in state} == names
    assert {float(state["step"]) for state in states if not sgd} == (set() if sgd else {8.0})


@pytest.mark.parametrize("metric", ["perplexity", "bleu"])
def test_a_first_score_that_is_not_a_number_gives_way_to_the_next(metric: str) -> None:
    training = Training(early_stopping=EarlyStopping(metric=metric), checkpoint_interval=1)
    state, found = TrainingState(), []
    for update, score in enumerate((math.nan, 5.0, math.nan, 5.0), start=1):
        state.update = update
        row = {METRICS[metric].column: score}
        found.append(judge_checkpoint(training, state, row))
        state.metrics.append({"update": update, **row})
    assert found == [True, True, False, False]
    assert (state.best_score, state.best_update, state.num_not_improved) == (5.0, 2, 2)


@pytest.mark.parametrize("metric", ["perplexity", "bleu"])
def test_early_stopping_counts_checkpoints_since_the_best(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    """Of BLEU more is better."""
    script(monkeypatch, 5.0, 4.0, 4.0, 4.5, 1.0)
    scores = iter((10.0, 30.0, 20.0, 29.0))
    monkeypatch.setattr("econmt.training.validation.bleu", lambda *a: Score("BLEU", next(scores), "s", "t"))
    stopping = "training.early_stopping"
    keys = (f"{stopping}.metric={metric}", f"{stopping}.max_num_checkpoint_not_improved=2")
    run = make_run("training.max_updates=50", *keys)
    result = run.train()
    assert (result.update, result.best_update) == (8, 4)
    name = metric.upper() if metric == "bleu" else metric
    assert result.reason == f"no better {name} for 2 checkpoints"
    assert make_results(run.context()).bleu == 30.0
    assert run.folder.best.read_bytes() == run.folder.parameters(4).read_bytes()


@pytest.mark.parametrize(
    ("overrides", "scores", "ends", "best"),
    [
        # Ends at updates 4 and 5 are worse than the checkpoint at 3, but do not count.
        (("max_num_checkpoint_not_improved=2",), (3.0, 3.1, 3.2, 3.0, 3.5, 3.6, 3.1, 3.2), (3, 4, 5), 3),
        # The end at update 4 is the best of all, but the next ones are compared with the checkpoint at 3.
        (("max_num_checkpoint_not_improved=2",), (3.0, 2.9, 3.2, 2.95, 3.0, 2.8, 2.9, 3.2, 2.95), (4,), 4),
        (
            ("schedule.name=plateau-reduce", "max_updates=9"),
            (3.0, 4.0, 3.2, 9.0, 3.0, 2.0, 4.0, 8.0, 3.2),
            (2, 4, 7),
            4,
        ),
    ],
)
def test_ends_between_checkpoints_do_not_count(
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    scores: tuple[float, ...],
    ends: tuple[int, ...],
    best: int,
) -> None:
    """A run in parts ends, and reduces its rate, where one does that never stopped, with the same parameters."""
    script(monkeypatch, *scores)  # of the whole run, then of the parts
    keys = ["checkpoint_interval=3", "schedule.reduce_num_not_improved=1", "schedule.reduce_factor=0.5"]
    keys += ["max_updates=50", "decode_and_evaluate=0", "keep_last_params=1", *overrides]
    both = [f"training.{'early_stopping.' if key.startswith('max_num') else ''}{key}" for key in keys]
    expected = make_run(*both, name="whole").train()
    for end in ends:
        make_run(*both, f"training.max_updates={end}", name="parts").train()
    run = make_run(*both, name="parts")
    found = run.train()
    assert (found.update, found.reason) == (expected.update, expected.reason)
    last = f"params.{expected.update:05d}.safetensors"
    other = make_run(name="whole")
    assert (run.folder.path / last).read_bytes() == (other.folder.path / last).read_bytes()
    rates = [
        {row["update"]: row["learning_rate"] for row in metrics(each.folder) if row["update"] % 3 == 0}
        for each in (run, other)
    ]
    assert rates[0] == rates[1]
    assert found.best_update == best
    assert run.folder.best.read_bytes() == run.folder.parameters(best).read_bytes()


@pytest.mark.parametrize(("limit", "updates"), [("max_updates=5", 5), ("max_epochs=1", 8)])
def test_limits(make_run: MakeRun, limit: str, updates: int) -> None:
    """30 pairs in batches of 4 are an epoch."""
    run = make_run("training.max_updates=null", "training.checkpoint_interval=100", f"training.{limit}")
    result = run.train()
    assert (result.update, result.reason) == (updates, f"{limit.replace('=', ' ')} reached")
    assert [row["update"] for row in metrics(run.folder)] == [updates]


def test_perplexity_of_two_ranks_is_that_of_one(make_run: MakeRun) -> None:
    trainer, parts = make_run().trainer(), list[Any]()
    step, evaluation = trainer.step, trainer.task.evaluation(trainer.prepared, "valid")
    pairs = trainer.prepared.valid
    evaluation = evaluation._replace(batches=[batch_of(trainer, [row], pairs) for row in range(len(pairs))])
    trainer.model.eval()
    expected = perplexity(step, evaluation)
    for rank in (1, 0):  # the second one knows what both have found
        gather = lambda own, patient: parts.append(own) or parts  # noqa: E731
        step.communicator = cast(Any, SimpleNamespace(size=2, rank=rank, gather=gather))
        found = perplexity(step, evaluation)
    assert found == expected
