"""Parameters in bfloat16 have the loss and the gradients of float32 ones with the same values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt.config.recipe import load_recipe
from econmt.engine.precision import NAMED
from econmt.engine.step import TrainingStep
from econmt.model import Implementations
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from tests.ops.triton.kernel_device import DEVICE

SIZES = (
    "model.embedding=16",
    "model.encoder={layers: 2, size: 32}",
    "model.decoder={layers: 2, size: 16}",
    "model.attention.size=16",
    "model.dropout=0.0",
)


def gradients(dtype: str, implementation: str) -> tuple[float, dict[str, Tensor]]:
    task = TranslationTask(load_recipe("quickstart", [*SIZES, f"training.param_dtype={dtype}"]), 60, 60)
    torch.manual_seed(3)
    model = task.build_model().train().to(DEVICE)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    how = Implementations.everywhere(implementation, "outputs")
    step = TrainingStep(task, model, NAMED["bfloat16"], implementations=how)
    torch.manual_seed(4)
    batch = task.example(Shape(3, 4, 3))
    loss = float(step.gradient([batch.to(step.device)], step.tokens([batch])).loss)
    step.optimizer.make_dense()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {part.dtype for part in named.values() if part is not None and part.dim() > 1} == {
        getattr(torch, dtype)
    }
    return loss, {name: part.float() for name, part in named.items() if part is not None}


@pytest.mark.parametrize("implementation", ["recompute", pytest.param("triton", marks=pytest.mark.thorough)])
def test_gradients_are_those_of_float32_parameters(implementation: str) -> None:
    (loss, narrow), (exact_loss, exact) = (
        gradients(dtype, implementation) for dtype in ("bfloat16", "float32")
    )
    assert loss == pytest.approx(exact_loss, rel=1e-6)
    assert narrow.keys() == exact.keys()
    for name, gradient in exact.items():
        assert (narrow[name] - gradient).abs().max() <= 2.0**-7 * gradient.abs().max(), name
