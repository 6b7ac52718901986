"""Training on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from econmt.errors import TrainingError
from tests.unit.training.tiny import Run, metrics

pytestmark = pytest.mark.cuda
MakeRun = Callable[..., Run]
GPU = ("training.device=cuda", "model.dropout=0.0")


def test_a_gpu_learns_what_a_cpu_learns(make_run: MakeRun) -> None:
    cpu = make_run("model.dropout=0.0", name="cpu")
    gpu = make_run(*GPU, "training.precision=float32", name="gpu")
    cpu.train()
    gpu.train()
    for there, here in zip(metrics(gpu.folder), metrics(cpu.folder), strict=True):
        assert there["target_tokens"] == here["target_tokens"]
        assert there["train_loss"] == pytest.approx(here["train_loss"], rel=1e-3)
        assert there["valid_perplexity"] == pytest.approx(here["valid_perplexity"], rel=1e-2)


def test_parameters_stay_float32_in_bfloat16(make_run: MakeRun) -> None:
    run = make_run(*GPU, "training.precision=bfloat16")
    run.train()
    trainer = run.trainer()
    assert trainer.precision == torch.bfloat16
    assert {p.dtype for p in trainer.parameters.values()} == {torch.float32}
    assert trainer.optimizer.state[next(iter(trainer.parameters.values()))]["exp_avg"].is_cuda


def test_a_run_in_parts_reads_the_same_data(make_run: MakeRun) -> None:
    make_run(*GPU, name="whole").train()
    make_run(*GPU, "training.max_updates=4", name="parts").train()
    make_run(*GPU, name="parts").train()
    whole, parts = metrics(make_run(name="whole").folder), metrics(make_run(name="parts").folder)
    for there, here in zip(parts, whole, strict=True):
        assert there["target_tokens"] == here["target_tokens"]
        assert there["train_loss"] == pytest.approx(here["train_loss"], rel=2e-2)


def test_loss_that_is_not_finite_is_found_one_update_late(make_run: MakeRun) -> None:
    trainer = make_run(*GPU).trainer()
    with torch.no_grad():
        trainer.model.output_bias.fill_(float("nan"))
    batch = next(trainer.batches)
    indices = [batch.indices.numpy()]
    loss, norm = trainer.gradient([batch], batch.target_tokens)
    assert trainer._readings.submit(1, loss, norm, batch.target_tokens, indices) == []
    with pytest.raises(TrainingError, match="the loss is not finite at update 1"):
        trainer._flush()
