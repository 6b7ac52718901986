"""Training on a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from econmt.data.batching.batches import pad_batch
from econmt.training.progress import Progress
from econmt_ops.dispatch.rule import rules_only
from tests.unit.training.tiny import MakeRun, Run, assert_parts_are_the_whole, metrics, write_text

pytestmark = pytest.mark.cuda
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


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_run_in_parts_is_the_run_that_never_stopped(make_run: MakeRun, graphs: str, precision: str) -> None:
    """Bit for bit, dropout included, with ops whose kernels add up in a fixed order."""
    how = (
        "training.device=cuda",
        f"training.cuda_graphs={graphs}",
        f"training.precision={precision}",
        f"training.loss_scale={2**22}",  # overflows at first
        "training.loss_scale_window=2",
        *named("recompute"),
    )
    assert_parts_are_the_whole(make_run, *how, ends=(4, 8))


def named(implementation: str) -> tuple[str, ...]:
    return tuple(f"ops.{op}={implementation}" for op in ("encoder", "decoder", "attention", "output"))


ROUND_THE_ATTENTION = (
    "model.decoder.input_feeding=false",
    "model.decoder.layers=2",
    "model.encoder.layers=2",
    "model.encoder.bidirectional=all",
    "training.label_smoothing=0.1",
    "training.trim_batches=always",
)
PLAIN = (
    "model.dropout=0.0",
    "training.optimizer.name=sgd",
    "training.gradient_clipping={type: value, threshold: 1.0}",
    "training.update_interval=2",
)
THIN = ("model.encoder.rank=2", "model.decoder.rank=2", "model.attention.layer_norm=true")


CASES = {
    "auto": named("auto"),
    "recompute": named("recompute"),
    "auto, round the attention": (*named("auto"), *ROUND_THE_ATTENTION),
    "recompute, round the attention": (*named("recompute"), *ROUND_THE_ATTENTION),
    "auto, plain": (*named("auto"), *PLAIN),
    "recompute, plain": (*named("recompute"), *PLAIN),
    "thin": (*named("recompute"), *THIN),
}
WAYS = {
    **{f"{name}, float32": (*changes, "training.precision=float32") for name, changes in CASES.items()},
    **{f"{name}, bfloat16": (*changes, "training.precision=bfloat16") for name, changes in CASES.items()},
    "auto, float16": (*named("auto"), "training.precision=float16"),
    "float16, several batches": ("training.precision=float16", "training.update_interval=2"),
    "float16, nadam": ("training.precision=float16", "training.optimizer.name=nadam"),
    "compiled": (*named("compiled"), *PLAIN, "training.precision=float32"),
}


@pytest.fixture(scope="module")
def more_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("more"), {"train": 1200, "valid": 2})


@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS.keys())
def test_no_update_waits_for_the_gpu(more_text: Path, tmp_path: Path, changes: tuple[str, ...]) -> None:
    # As many words in a batch as make PyTorch sort them, where it adds up the gradients of embeddings.
    how = ("training.device=cuda", "training.batch.size=512", "training.log_interval=1000")
    run = Run(more_text, tmp_path / "run", (*how, *changes))
    trainer = run.trainer()
    trainer.model.train()
    progress = Progress(run.folder.log, run.folder.tensorboard, run.console, 0)
    assert max(batch.rows * batch.target for batch in trainer.batches.shapes()) > 3072
    with rules_only():
        # All shapes, so that nothing is set up or compiled later.
        for _ in range(trainer.batches.batches_per_epoch):
            trainer._update(progress)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchroniz"):
                torch.ones(1, device="cuda").item()
            for _ in range(5):
                trainer._update(progress)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    trainer._flush()
    assert trainer.state.update == trainer.batches.batches_per_epoch + 5
    assert math.isfinite(trainer.state.gradient_norm)


def test_a_batch_does_not_wait_for_the_gpu() -> None:
    ids, lengths = np.full((512, 99), 7), np.full(512, 99)
    batch = pad_batch(np.arange(512), ids, lengths, ids, lengths, (100, 100))
    # The first time there is no pinned memory yet, and the system is asked for it.
    for _ in range(2):
        torch.cuda.synchronize()
        slept = torch.cuda.Event()
        torch.cuda._sleep(10**9)  # cycles: half a second
        slept.record()
        there = batch.to("cuda")
        sleeps = not slept.query()
    assert sleeps
    assert torch.equal(there.source.cpu(), batch.source)
    assert torch.equal(there.target_output.cpu(), batch.target_output)
