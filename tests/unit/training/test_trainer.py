from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import sacrebleu
import torch

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
from econmt.training.trainer import Trainer
from econmt.training.update_metrics import UpdateMetrics, not_finite
from econmt.training.validation import Validation
from tests.unit.training.tiny import Run, metrics, snapshot

MakeRun = Callable[..., Run]


def batch_of(trainer: Trainer, indices: range) -> Batch:
    chosen = torch.tensor(list(indices)).numpy()
    source, source_lengths, target, target_lengths = trainer.prepared.train.gather(chosen)
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


def test_update_interval_takes_several_batches_for_one_update(make_run: MakeRun) -> None:
    # 30 pairs, batches of 4: 8 an epoch; 4 updates of 3 batches are an epoch and a half.
    run = make_run("training.update_interval=3", "training.max_updates=4")
    result = run.train()
    assert result.update == 4
    rows = metrics(run.folder)
    assert [row["epoch"] for row in rows] == [0, 1]
    lengths = run.prepared().train.target_lengths + 1
    assert int(lengths.sum()) < rows[-1]["target_tokens"] < 2 * int(lengths.sum())
    # The first row is about all updates so far, which take some of the seconds of the run.
    assert 0.0 < rows[0]["target_tokens"] / rows[0]["target_tokens_per_second"] < rows[0]["seconds"]


def test_bleu_of_metrics_and_log_is_that_of_sacrebleu_on_the_hypotheses_file(make_run: MakeRun) -> None:
    run = make_run(
        "training.max_updates=60",
        "training.checkpoint_interval=20",
        "training.keep_last_params=9",
        "model.dropout=0.0",
    )
    run.train()
    references = (run.text / "valid.trg").read_text().splitlines()
    scores = []
    for line in run.folder.metrics.read_text().splitlines()[1:]:
        row = dict(
            zip(run.folder.metrics.read_text().split("\n")[0].split("\t"), line.split("\t"), strict=True)
        )
        hypotheses = run.folder.hypotheses(int(row["update"])).read_text().splitlines()
        by_hand = sacrebleu.corpus_bleu(hypotheses, [references])
        assert row["bleu"] == repr(by_hand.score)
        assert f"BLEU {by_hand.score:.2f}" in run.folder.log.read_text()
        scores.append(by_hand.score)
    assert max(scores) > 0.0
    metric = sacrebleu.BLEU()
    metric.corpus_score(references, [references])
    assert str(metric.get_signature()) in run.folder.log.read_text()


def test_decode_and_evaluate_bounds_the_sentences_translated(make_run: MakeRun) -> None:
    some = make_run("training.decode_and_evaluate=2", "training.max_updates=2", name="some")
    some.train()
    assert len(some.folder.hypotheses(2).read_text().splitlines()) == 2
    none = make_run("training.decode_and_evaluate=0", "training.max_updates=2", name="none")
    none.train()
    assert not none.folder.hypotheses(2).exists()
    assert math.isnan(metrics(none.folder)[0]["bleu"])


def test_perplexity_is_that_of_the_saved_parameters(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=4")
    run.train()
    trainer = run.trainer()
    store = trainer.prepared.valid
    total, tokens = 0.0, 0
    trainer.model.eval()
    for index in range(len(store)):
        source, source_lengths, target, target_lengths = store.gather(torch.tensor([index]).numpy())
        shape = (int(source_lengths[0]) + 1, int(target_lengths[0]) + 1)
        one = pad_batch(torch.tensor([index]).numpy(), source, source_lengths, target, target_lengths, shape)
        hidden = trainer.model(one.source, one.source_lengths, one.target_input)
        logits = hidden[0] @ trainer.model.output.weight.T + trainer.model.output.bias
        total += torch.nn.functional.cross_entropy(logits, one.target_output[0], reduction="sum").item()
        tokens += one.target_tokens
    assert metrics(run.folder)[-1]["valid_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)


def test_figures_of_the_log_are_those_of_the_updates_since_the_last_line(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_run("training.update_interval=2", "training.log_interval=3").trainer()
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
        meter = trainer.state.since_log
        assert meter.tokens == (0 if update == 3 else sum(tokens))
    assert trainer.state.target_tokens == sum(tokens for _, _, tokens in taken)


def test_the_loss_of_each_log_line_is_that_since_the_line_before(make_run: MakeRun) -> None:
    """As that of a row of metrics is where both have the same interval."""
    run = make_run("training.log_interval=2", "training.max_updates=6")
    run.train()
    logged = re.findall(r"^update (\d+)  loss ([\d.]+)", run.said(), re.MULTILINE)
    assert logged == [(f"{row['update']:.0f}", f"{row['train_loss']:.4f}") for row in metrics(run.folder)]
    assert len(logged) == 3


def test_validation_draws_nothing_from_training(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawing(*arguments: object, **named: object) -> Validation:
        random.random()
        np.random.rand()
        torch.rand(3)
        return Validation(2.0, 0.0, "", None)

    monkeypatch.setattr("econmt.training.trainer.validate", drawing)
    often = make_run("training.checkpoint_interval=1", name="often")
    seldom = make_run("training.checkpoint_interval=8", name="seldom")
    often.train()
    seldom.train()
    assert often.folder.parameters(8).read_bytes() == seldom.folder.parameters(8).read_bytes()


def test_loss_that_is_not_finite_stops_before_it_reaches_the_parameters(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=4")
    run.train()
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
    for pair in pairs:
        assert trainer.prepared.train.location(pair) in message
    assert "the last good checkpoint is update 4" in message
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


PLATEAU = (
    "training.schedule.name=plateau-reduce",
    "training.schedule.reduce_factor=0.5",
    "training.schedule.reduce_num_not_improved=1",
)


def script(monkeypatch: pytest.MonkeyPatch, *perplexities: float) -> None:
    """Makes validation find these perplexities, one a checkpoint."""
    values = iter(perplexities)
    monkeypatch.setattr("econmt.training.validation.perplexity", lambda *arguments: next(values))


def test_plateau_goes_back_to_the_best_parameters_and_optimizer_state(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, 3.0, 4.0, 3.0)
    run = make_run(*PLATEAU, "training.max_updates=4")
    run.train()
    assert "checkpoint 4: validation perplexity 4.00" in run.said()
    assert "best is checkpoint 2; training returns to it with a reduced learning rate" in run.said()
    trainer = run.trainer()
    assert trainer.state.update == 4
    assert trainer.schedule.learning_rate(5) == pytest.approx(0.01)
    best = make_run(*PLATEAU, "training.max_updates=2", name="best")
    best.train()
    expected = best.trainer()
    for name, parameter in trainer.parameters.items():
        assert torch.equal(parameter, expected.parameters[name])
        state, wanted = (
            trainer.optimizer.state[parameter],
            expected.optimizer.state[expected.parameters[name]],
        )
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(state[key], wanted[key]) for key in state)
    # What was validated at update 4 is kept as it was.
    assert run.folder.parameters(4).read_bytes() != run.folder.parameters(2).read_bytes()


def test_a_plateau_after_a_change_of_schedule_goes_back_to_the_parameters_alone(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, 3.0, 4.0, 4.5, 5.0)
    make_run("training.max_updates=6").train()
    run = make_run(*PLATEAU, "training.max_updates=8")
    run.train(resume_with_changes=True)
    best = run.folder.best.read_bytes()
    trainer = run.trainer()
    assert trainer.state.parameters_from == 2
    assert run.folder.parameters(2).read_bytes() == best
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {8.0}


def test_a_plateau_after_a_change_of_optimizer_goes_back_to_the_parameters_alone(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best checkpoint has the state of another optimizer."""
    script(monkeypatch, 3.0, 4.0)
    make_run(*PLATEAU, "training.max_updates=2").train()
    run = make_run(*PLATEAU, "training.max_updates=4", "training.optimizer={name: sgd, momentum: 0.5}")
    run.train(resume_with_changes=True)
    trainer = run.trainer()
    assert trainer.state.parameters_from == 2
    states = [state for state in trainer.optimizer.state.values() if state]
    assert states
    assert {name for state in states for name in state} == {"momentum_buffer"}


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


def test_early_stopping_counts_checkpoints_since_the_best(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, 5.0, 4.0, 4.0, 4.5, 1.0)
    run = make_run("training.max_updates=50", "training.early_stopping.max_num_checkpoint_not_improved=2")
    result = run.train()
    assert (result.update, result.best_update) == (8, 4)
    assert result.reason == "no better perplexity for 2 checkpoints"


@pytest.mark.parametrize(
    ("overrides", "whole", "ends", "parts", "best"),
    [
        # Ends at updates 4 and 5 are worse than the checkpoint at 3, but do not count.
        (("max_num_checkpoint_not_improved=2",), (3.0, 3.1, 3.2), (3, 4, 5), (3.0, 3.5, 3.6, 3.1, 3.2), 3),
        # The end at update 4 is the best of all, but the next ones are compared with the checkpoint at 3.
        (("max_num_checkpoint_not_improved=2",), (3.0, 2.9, 3.2, 2.95), (4,), (3.0, 2.8, 2.9, 3.2, 2.95), 4),
        (("schedule.name=plateau-reduce", "max_updates=9"), (3.0, 4.0, 3.2), (2, 4, 7), (9.0, 3.0, 2.0, 4.0, 8.0, 3.2), 4),
    ],
)  # fmt: skip
def test_ends_between_checkpoints_do_not_count(
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    whole: tuple[float, ...],
    ends: tuple[int, ...],
    parts: tuple[float, ...],
    best: int,
) -> None:
    """A run in parts ends, and reduces its rate, where one does that never stopped, with the same parameters."""
    script(monkeypatch, *whole, *parts)
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


def test_early_stopping_on_bleu_prefers_more(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter((10.0, 30.0, 20.0, 29.0))
    monkeypatch.setattr("econmt.training.validation.bleu", lambda *a: Score("BLEU", next(scores), "s", "t"))
    run = make_run(
        "training.max_updates=50",
        "training.early_stopping.metric=bleu",
        "training.early_stopping.max_num_checkpoint_not_improved=2",
    )
    result = run.train()
    assert (result.update, result.best_update) == (8, 4)
    assert result.reason == "no better BLEU for 2 checkpoints"
    assert run.folder.best.read_bytes() == run.folder.parameters(4).read_bytes()


@pytest.mark.parametrize(
    ("limit", "updates"),
    [
        ("max_updates=5", 5),
        ("max_epochs=2", 16),  # 30 pairs in batches of 4
    ],
)
def test_limits(make_run: MakeRun, limit: str, updates: int) -> None:
    run = make_run("training.max_updates=null", "training.checkpoint_interval=100", f"training.{limit}")
    result = run.train()
    assert result.update == updates
    assert result.reason == f"{limit.replace('=', ' ')} reached"
    assert [row["update"] for row in metrics(run.folder)] == [updates]
