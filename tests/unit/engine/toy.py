"""A training step whose loss is any function, over a batch that it need not look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from econmt.config.recipe import Recipe, load_recipe
from econmt.data.batching.batches import Batch
from econmt.engine.step import TrainingStep
from econmt.model import Implementations, TranslationModel
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask

SGD = "training.optimizer={name: sgd, learning_rate: 0.1}"
ADAM = "training.optimizer={name: adam, learning_rate: 0.1}"
SIDES = ("model.encoder={layers: 1, size: 8}", "model.decoder={layers: 1, size: 8}")


def tiny_recipe(*overrides: str) -> Recipe:
    """A recipe of a tiny model."""
    return load_recipe("quickstart", ["model.embedding=6", *SIDES, "model.attention.size=5", *overrides])


@dataclass(frozen=True)
class LossTask(TranslationTask):
    """Translation with another loss.

    Args:
        function: gives it, a scalar, whatever the batch.
    """

    function: Callable[[], Tensor]

    def loss(
        self, model: nn.Module, batch: Batch, implementations: Implementations, label_smoothing: float = 0.0
    ) -> Tensor:
        """The function's."""
        return self.function()


def step_of(model: TranslationModel, loss: Callable[[], Tensor], *overrides: str) -> TrainingStep:
    """A step that minimises ``loss`` a token, by plain SGD and without clipping unless the overrides say so."""
    recipe = tiny_recipe("training.gradient_clipping={type: none}", SGD, *overrides)
    return TrainingStep(LossTask(recipe, model.source_size, model.target_size, loss), model)


def some_batch(tokens: int, source: int = 3) -> Batch:
    """One row of so many target tokens."""
    return TranslationTask(tiny_recipe(), 11, 11).example(Shape(1, source, tokens))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Dense copies of all gradients."""
    return {
        name: part.grad.to_dense().clone() for name, part in model.named_parameters() if part.grad is not None
    }


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters."""
    return {name: part.detach().clone() for name, part in model.named_parameters()}


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Fail unless both have the same names and values, bit for bit."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
