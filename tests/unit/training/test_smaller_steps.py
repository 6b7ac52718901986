"""Runs with the options that make a step smaller: updates in the backward pass, parameters in bfloat16."""

from __future__ import annotations

import itertools

import pytest
import torch

from econmt.checkpoint.tensor_files import read_tensors
from econmt.config.recipe import load_recipe
from econmt.engine.parameter_types import in_float32
from econmt.errors import InputError
from econmt.training.trainer import Trainer
from tests.unit.training.test_hooks import MakeRun
from tests.unit.training.tiny import metrics, snapshot

NARROW = ("training.param_dtype=bfloat16", "training.precision=bfloat16")
BY_VALUE = "training.gradient_clipping={type: value, threshold: 0.1}"
LAST = "params.00008.safetensors"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["adam8bit", "adam", "sgd"])
def test_a_run_with_parameters_in_bfloat16_resumes_exactly(make_run: MakeRun, optimizer: str) -> None:
    """Saved parameters are float32 files whose values are those of bfloat16."""
    keys = (*NARROW, f"training.optimizer={{name: {optimizer}, learning_rate: 0.02}}")
    whole = make_run(*keys, name="whole")
    whole.train()
    for updates in (3, 8):
        make_run(*keys, f"training.max_updates={updates}", name="parts").train()
    parts = make_run(*keys, name="parts")
    assert snapshot(whole.folder)[LAST] == snapshot(parts.folder)[LAST]
    tensors, _ = read_tensors(whole.folder.parameters(8))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    matrices = [tensor for tensor in tensors.values() if tensor.dim() > 1]
    assert all(tensor.equal(tensor.bfloat16().float()) for tensor in matrices)
    other = make_run(*keys, "training.seed=8", name="other")
    other.train()
    assert snapshot(other.folder)[LAST] != snapshot(whole.folder)[LAST]


@pytest.mark.slow
def test_a_model_learns_with_parameters_in_bfloat16(make_run: MakeRun) -> None:
    longer = ("training.max_updates=60", "training.checkpoint_interval=20", "training.decode_and_evaluate=0")
    perplexities = []
    for name, keys in (("narrow", NARROW), ("wide", ("training.precision=bfloat16",))):
        run = make_run(*longer, *keys, name=name)
        run.train()
        perplexities.append([row["valid_perplexity"] for row in metrics(run.folder)])
    assert perplexities[0][-1] < 0.8 * perplexities[0][0]
    assert perplexities[0][-1] == pytest.approx(perplexities[1][-1], rel=0.1)


def test_values_set_in_float32_are_rounded_in_place() -> None:
    matrix = torch.nn.Parameter(torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16))
    vector = torch.nn.Parameter(torch.tensor([1.0]))
    address = matrix.data_ptr()
    with in_float32([matrix, vector]):
        assert matrix.dtype == torch.float32
        assert matrix.tolist() == [[1.0, 3.0]]
        with torch.no_grad():
            matrix[0, 1] = 1.0 + 2.0**-10
    assert matrix.dtype == torch.bfloat16
    assert matrix.data_ptr() == address
    assert matrix.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("keys", [(), ("training.memory_budget=1GiB",)], ids=["plain", "budget"])
def test_a_run_with_updates_in_the_backward_pass_is_the_same(
    make_run: MakeRun, keys: tuple[str, ...]
) -> None:
    runs = []
    for when in ("always", "never"):
        run = make_run(BY_VALUE, f"training.optimizer_in_backward={when}", *keys, name=when)
        run.train()
        runs.append((snapshot(run.folder)[LAST], [row["gradient_norm"] for row in metrics(run.folder)]))
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_a_step_that_has_updated_parameters_is_not_repeated(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in the backward pass: the plan would make parts, but some parameters have changed."""
    monkeypatch.setattr("econmt_ops.optimizers.in_backward.GROUP_BYTES", 1)
    budget = "training.memory_budget=1GiB"
    for when, message in (("always", "out of memory"), ("never", "")):
        trainer: Trainer = make_run(
            BY_VALUE, budget, f"training.optimizer_in_backward={when}", name=when
        ).trainer()
        batches = [next(trainer.batches)]
        failures = itertools.count()
        first = next(iter(trainer.parameters.values()))

        def fail(_gradient: torch.Tensor, failures: itertools.count[int] = failures) -> None:
            if next(failures) == 0:
                raise MemoryError

        hook = first.register_hook(fail)
        try:
            if message:
                with pytest.raises(Exception, match=message):
                    trainer.gradient(batches, updates=True)
            else:
                trainer.gradient(batches, updates=True)
        finally:
            hook.remove()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ("training.precision=float32",),
            "param_dtype: bfloat16 cannot be combined with training.precision: float32",
        ),
        (("training.averaging.start=at-once",), "cannot be combined with training.averaging.start: at-once"),
    ],
)
def test_what_bfloat16_cannot_be_combined_with(keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe("quickstart", ["training.param_dtype=bfloat16", *keys])
