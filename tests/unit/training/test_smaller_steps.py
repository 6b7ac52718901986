"""Runs with the options that make a step smaller: updates in the backward pass, parameters in bfloat16."""

from __future__ import annotations

import itertools

import pytest
import torch

from econmt.checkpoint.tensor_files import read_tensors
from econmt.engine.parameters import in_float32
from econmt.training.trainer import Trainer
from tests.unit.training.test_hooks import MakeRun

NARROW = ("training.param_dtype=bfloat16", "training.precision=bfloat16")
BY_VALUE = "training.gradient_clipping={type: value, threshold: 0.1}"


def test_saved_parameters_are_float32_files_of_values_of_bfloat16(make_run: MakeRun) -> None:
    run = make_run(*NARROW, "training.optimizer={name: adam8bit, learning_rate: 0.02}").trained()
    tensors, _ = read_tensors(run.folder.parameters(8))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    matrices = [tensor for tensor in tensors.values() if tensor.dim() > 1]
    assert all(tensor.equal(tensor.bfloat16().float()) for tensor in matrices)


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
