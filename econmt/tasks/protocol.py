"""Interface of a task, as used by training, memory profiling, memory planning and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from econmt.config.recipe import Recipe
from econmt.data.batching.batch import AnyBatch, Batches
from econmt.data.batching.store import PreparedData
from econmt.model import Implementations, IncrementalModel
from econmt.model.translation import most_distinct

FIRST_ID = 4
"""First id that is not a special token."""

Split = Literal["valid", "test"]


class Shape(NamedTuple):
    """Shape of a batch: rows, source positions (1 if there is no source), target positions."""

    rows: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.source} x {self.target}"


class Evaluation(NamedTuple):
    """Batches for measuring a perplexity.

    Attributes:
        batches: batches in order, whose :meth:`Task.loss` is summed with the model in evaluation mode.
        words: number of words by which the sum is divided; None: the number of target tokens.
        consecutive: True if each batch continues with the states that the previous batch left in the model.
    """

    batches: Iterator[AnyBatch]
    words: int | None = None
    consecutive: bool = False


class Figure(NamedTuple):
    """A figure of a checkpoint beside perplexity and scores of translations.

    Attributes:
        column: its column of metrics.tsv.
        sum: function from a batch on the model's device to what is added up over the text, a scalar.
        scale: factor of the sum per target token.
    """

    column: str
    sum: Callable[[AnyBatch, Implementations], Tensor]
    scale: float = 1.0


class Task(Protocol):
    """Interface of a task: builds the model and its batches, and computes the loss.

    Model buffers carry state from one training step to the next and are saved in checkpoints.
    """

    @property
    def name(self) -> str:
        """Name of the task, the value of a recipe's key ``task``."""

    @property
    def translates(self) -> bool:
        """True if its model produces translations by search, in validation and afterwards."""

    @property
    def recipe(self) -> Recipe:
        """Recipe of the run."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the vocabularies, special tokens included."""

    def build_model(self) -> nn.Module:
        """Builds a model on the default device with parameters initialised by torch's default generator."""

    def batches(self, prepared: PreparedData) -> Batches[AnyBatch]:
        """Returns the endless stream of training batches, the same on each rank; its position can be saved."""

    def evaluation(self, prepared: PreparedData, split: Split, *, exact: bool = False) -> Evaluation:
        """Returns the batches for the perplexity of a split; ``exact`` gives the final figure, but takes longer."""

    def example(self, shape: Shape) -> AnyBatch:
        """Returns a batch of full rows of random ids, for measurements that do not depend on the text."""

    def loss(
        self,
        model: nn.Module,
        batch: AnyBatch,
        implementations: Implementations,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Computes the loss of a batch, summed over its target tokens without padding.

        The caller divides the sum by the target tokens of all batches of an update, so that each token has the same
        weight.

        Args:
            model: model from :meth:`build_model`, in training or evaluation mode.
            batch: batch on the model's device.
            label_smoothing: probability mass spread evenly over all target tokens.

        Returns:
            Loss in nats, a float32 scalar on the model's device, without synchronisation.
        """

    def figures(self, model: nn.Module, prepared: PreparedData) -> list[Figure]:
        """Returns the further figures of a checkpoint that the recipe and its validation text ask for."""

    def search_model(self, model: nn.Module) -> IncrementalModel | None:
        """Returns a model from :meth:`build_model` as searches use it; None unless the task :attr:`translates`."""

    def description(self) -> dict[str, Any]:
        """Returns the model section of the recipe and the vocabulary sizes as JSON values, which identify the model."""

    def layers(self, model: nn.Module) -> dict[str, str]:
        """Returns the layer (embedding, encoder, attention, decoder or output) of each parameter, by parameter name."""


def random_ids(vocabulary: int, rows: int, positions: int) -> torch.Tensor:
    """Draws ids (rows, positions) with as many distinct words as natural text of this size has at most."""
    words = min(vocabulary - FIRST_ID, most_distinct(rows * positions) or vocabulary)
    return torch.randint(FIRST_ID, FIRST_ID + max(1, words), (rows, positions))
