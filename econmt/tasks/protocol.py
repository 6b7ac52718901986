"""What a trainer, a ledger, an estimate and a bench need to know of a task, and no more."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from econmt.data.batches import Batch, BatchIterator
from econmt.data.store import PreparedData
from econmt.model import Implementations
from econmt.recipe import Recipe


class Shape(NamedTuple):
    """Of a batch: rows, source positions, target positions."""

    rows: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.source} x {self.target}"


class Task(Protocol):
    """Something that a model learns from batches."""

    @property
    def name(self) -> str:
        """As the key ``task`` of a recipe has it."""

    @property
    def recipe(self) -> Recipe:
        """The run."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries of its vocabularies, special symbols counted."""

    def build_model(self) -> nn.Module:
        """A model with first parameters, drawn from torch's default generator, on the default device."""

    def batches(self, prepared: PreparedData, rank: int = 0, ranks: int = 1) -> BatchIterator:
        """The endless stream of training batches, of which this rank gets its share; its state can be saved."""

    def example(self, shape: Shape) -> Batch:
        """A batch of full rows of random ids: what a step takes does not depend on the text."""

    def loss(
        self, model: nn.Module, batch: Batch, implementations: Implementations, label_smoothing: float = 0.0
    ) -> Tensor:
        """The loss summed over a batch's target tokens, padding not counted.

        The sum, not the mean: whoever accumulates several batches divides by the target tokens of all of them, so that
        the size of one batch makes no difference to the update. How many they are a batch knows.

        Args:
            model: what :meth:`build_model` made, in training or evaluation mode.
            batch: on the model's device.
            implementations: of the ops.
            label_smoothing: probability mass spread evenly over all target tokens.

        Returns:
            A float32 scalar in nats on the model's device, which nothing here waits for.
        """

    def description(self) -> dict[str, Any]:
        """What tells its models apart, as JSON values: the recipe's model section and the sizes of vocabularies."""

    def layers(self, model: nn.Module) -> dict[str, str]:
        """The ledger's layer (embedding, encoder, attention, decoder, output) of every parameter name of a model."""


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next(model.parameters()).device
