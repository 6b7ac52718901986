"""Training in float16: the loss scale follows overflows, whose updates are skipped, and a run goes on with it exactly."""

from __future__ import annotations

import json

import pytest
import torch

from econmt.errors import InputError, TrainingError
from econmt.training.progress import Progress
from econmt.training.trainer import Trainer
from tests.unit.training.tiny import MakeRun, Run, assert_parts_are_the_whole, metrics

HALF = "training.precision=float16"
LARGE = (HALF, f"training.loss_scale={2**30}", "training.loss_scale_window=3")
"""A scale with which gradients overflow at first, and that then grows and falls again in a few updates."""


OTHERS = (
    "training.averaging={start: at-once, decay: 0.5}",
    "training.optimizer.name=adam8bit",
    "model.decoder.size=40",
    "training.update_interval=2",
)


def begin(run: Run) -> Trainer:
    trainer = run.trainer()
    trainer.model.train()
    return trainer


def tensors(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of the parameters and the optimizer's state."""
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return [part.detach().clone() for part in (*trainer.parameters.values(), *states)]


def scale_of(trainer: Trainer) -> tuple[float, int]:
    return trainer.step.loss_scale.state()


def test_an_overflow_skips_the_update_and_halves_the_scale(make_run: MakeRun) -> None:
    several = ("training.update_interval=2", "training.log_interval=100")
    trainer = begin(make_run(*LARGE, *several, "training.averaging.start=at-once"))
    trainer.optimizer.prepare()
    before, seen = tensors(trainer), []
    while trainer.state.skipped == trainer.state.update:
        assert all(map(torch.equal, tensors(trainer)[: len(trainer.parameters)], before))
        seen.append(scale_of(trainer)[0])
        assert trainer.state.gradient_norm == 0.0, "that of the last update that was done"
        trainer._update(Progress.silent())
    assert len(seen) > 2
    assert seen == [2.0 ** (30 - number) for number in range(len(seen))]
    assert trainer.state.skipped == len(seen) - 1
    assert scale_of(trainer) == (seen[-1], 1)
    assert not torch.equal(tensors(trainer)[0], before[0])
    steps = {float(state["step"]) for state in trainer.optimizer.state.values()}
    assert steps == {1.0}, "the optimizer counts only updates that were done"
    figures = trainer._figures(trainer.state.update)
    assert f"loss scale {seen[-1]:g}, {len(seen) - 1} skipped" in figures.line()
    assert 0.0 < figures.gradient_norm < float("inf")
    for number in range(2):
        trainer._update(Progress.silent())
        assert scale_of(trainer) == (seen[-1], 2) if number == 0 else (2 * seen[-1], 0)
    trainer.step.loss_scale.restore(2.0**30, 0)
    assert trainer.step([next(trainer.batches)]).loss_scale == 2.0**30, "that of the step, not of the next"
    assert scale_of(trainer)[0] == 2.0**29


@pytest.mark.parametrize(
    "changes",
    [(), pytest.param(OTHERS, marks=pytest.mark.thorough)],
    ids=["plain", "average, 8 bits, several batches"],
)
def test_a_run_in_parts_keeps_scale_and_counter(make_run: MakeRun, changes: tuple[str, ...]) -> None:
    """Also where it ends right after an overflow, or between two."""
    how = (*LARGE, *changes, "training.checkpoint_interval=4")
    whole = assert_parts_are_the_whole(make_run, *how, ends=(4, 16, 24))
    rows = metrics(whole.folder)
    assert rows[0]["skipped_updates"] == 4.0
    assert rows[0]["loss_scale"] == 2.0**26
    assert 4.0 < rows[-1]["skipped_updates"] < 24.0
    assert len({row["loss_scale"] for row in rows}) > 2
    assert rows[-1]["loss_scale"] > 2.0 ** (30 - rows[-1]["skipped_updates"]), "it has grown in between"
    state = json.loads(next(whole.folder.path.glob("training_state/*24/state.json")).read_text())
    assert state["loss_scale"]["scale"] == rows[-1]["loss_scale"]
    assert state["skipped"] == rows[-1]["skipped_updates"]


def test_a_scale_that_is_too_small_stops_the_run(make_run: MakeRun) -> None:
    trainer = begin(make_run(HALF))
    trainer.step.loss_scale.restore(2.0**-13, 0)
    trainer._update(Progress.silent())
    trainer.step.loss_scale.restore(2.0**-14, 0)
    with pytest.raises(TrainingError) as caught:
        trainer._update(Progress.silent())
    assert str(caught.value) == (
        "gradients overflow float16 at update 2 even with a loss scale of 6.1e-05; there is no checkpoint yet; "
        "lower training.optimizer.learning_rate, or compute in training.precision=float32"
    )


def test_a_loss_that_is_not_finite_is_no_matter_of_scale(make_run: MakeRun) -> None:
    trainer = begin(make_run(HALF))
    with torch.no_grad():
        trainer.model.output.bias.fill_(float("nan"))
    message = r"the loss is not finite at update 1.*float32, which has a wider range"
    with pytest.raises(TrainingError, match=message):
        trainer._update(Progress.silent())


def test_a_scale_is_a_power_of_two(make_run: MakeRun) -> None:
    with pytest.raises(InputError, match="loss_scale 1000 is not a power of two; use 512 or 1024"):
        make_run(HALF, "training.loss_scale=1000")


def test_another_precision_starts_and_ends_without_a_scale(make_run: MakeRun) -> None:
    """A run that goes on in float16 starts with the recipe's scale, and one that leaves float16 forgets it."""
    plain: tuple[str, object] = ("float32", {})
    scales = [plain, ("float16", {"scale": 2.0**16, "good": 2}), plain]
    for number, (precision, scale) in enumerate(scales, start=1):
        run = make_run(f"training.precision={precision}", f"training.max_updates={2 * number}")
        run.train(resume_with_changes=True)
        saved = json.loads(max(run.folder.path.glob("training_state/*/state.json")).read_text())
        assert (saved["precision"], saved["loss_scale"]) == (precision, scale)
