"""What a trainer, a ledger, an estimate and a bench need to know of a task, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from econmt.config.recipe import Recipe
from econmt.data.batching.batch import AnyBatch, Batches
from econmt.data.batching.store import PreparedData
from econmt.model import Implementations
from econmt.model.translation import most_distinct

FIRST_ID = 4
"""Ids below are special symbols."""

Split = Literal["valid", "test"]


class Shape(NamedTuple):
    """Of a batch: rows, source positions, target positions; 1 source position where there is no source."""

    rows: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.source} x {self.target}"


class Evaluation(NamedTuple):
    """What a perplexity is measured with.

    Attributes:
        batches: in order, for a model in evaluation mode: :meth:`Task.loss` of each is added up.
        words: of all of them, by which the sum is divided; None: their target tokens.
        consecutive: whether each batch goes on, row by row, with the state that the one before has left.
    """

    batches: Iterator[AnyBatch]
    words: int | None = None
    consecutive: bool = False


class Task(Protocol):
    """Something that a model learns from batches.

    What a model's buffers hold is carried from one training step to the next: checkpoints have it.
    """

    @property
    def name(self) -> str:
        """As the key ``task`` of a recipe has it."""

    @property
    def translates(self) -> bool:
        """Whether its model is searched for translations, in validation and afterwards."""

    @property
    def recipe(self) -> Recipe:
        """The run."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries of its vocabularies, special symbols counted."""

    def build_model(self) -> nn.Module:
        """A model with first parameters, drawn from torch's default generator, on the default device."""

    def batches(self, prepared: PreparedData) -> Batches:
        """The endless stream of training batches, the same on each rank; its state can be saved."""

    def evaluation(self, prepared: PreparedData, split: Split, *, exact: bool = False) -> Evaluation:
        """What the perplexity of a split is measured with; ``exact``: for a final figure, though it takes longer."""

    def example(self, shape: Shape) -> AnyBatch:
        """A batch of full rows of random ids: what a step takes does not depend on the text."""

    def loss(
        self,
        model: nn.Module,
        batch: AnyBatch,
        implementations: Implementations,
        label_smoothing: float = 0.0,
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


def random_ids(vocabulary: int, rows: int, positions: int) -> torch.Tensor:
    """Ids (rows, positions) of no more different words than text has."""
    words = min(vocabulary - FIRST_ID, most_distinct(rows * positions) or vocabulary)
    return torch.randint(FIRST_ID, FIRST_ID + max(1, words), (rows, positions))


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next(model.parameters()).device
