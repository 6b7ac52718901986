"""Translation: sentence pairs, an attention-LSTM model, the cross-entropy of the target tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from econmt.data.batches import Batch, BatchIterator, training_batches
from econmt.data.store import PreparedData
from econmt.model import Implementations, TranslationModel, build_model
from econmt.model.translation import most_distinct
from econmt.recipe import Recipe
from econmt.tasks.protocol import Shape

_FIRST_ID = 4
"""Ids below are special symbols."""


@dataclass(frozen=True)
class TranslationTask:
    """See :class:`econmt.tasks.protocol.Task`.

    Args:
        recipe: the run.
        source_size: source vocabulary, special symbols counted.
        target_size: target vocabulary.
    """

    recipe: Recipe
    source_size: int
    target_size: int
    name = "translation"

    @classmethod
    def of(cls, recipe: Recipe, prepared: PreparedData) -> TranslationTask:
        """The task of a recipe over its prepared text."""
        source, target = prepared.vocabularies
        return cls(recipe, source.size, target.size)

    @property
    def sizes(self) -> tuple[int, int]:
        """Entries of the source and of the target vocabulary."""
        return self.source_size, self.target_size

    def build_model(self) -> TranslationModel:
        """See :meth:`econmt.tasks.protocol.Task.build_model`."""
        return build_model(self.recipe, self.source_size, self.target_size)

    def batches(self, prepared: PreparedData, rank: int = 0, ranks: int = 1) -> BatchIterator:
        """See :meth:`econmt.tasks.protocol.Task.batches`."""
        return training_batches(self.recipe, prepared, rank=rank, world_size=ranks)

    def example(self, shape: Shape) -> Batch:
        """See :meth:`econmt.tasks.protocol.Task.example`."""
        rows, source, target = shape
        return Batch(
            source=_random_ids(self.source_size, rows, source),
            source_lengths=torch.full((rows,), source),
            target_input=_random_ids(self.target_size, rows, target),
            target_output=_random_ids(self.target_size, rows, target),
            target_lengths=torch.full((rows,), target),
            indices=torch.arange(rows),
            source_tokens=rows * source,
            target_tokens=rows * target,
        )

    def loss(
        self, model: nn.Module, batch: Batch, implementations: Implementations, label_smoothing: float = 0.0
    ) -> Tensor:
        """See :meth:`econmt.tasks.protocol.Task.loss`; the end of a sentence is a target token too."""
        assert isinstance(model, TranslationModel)
        return model.loss(
            batch.source,
            batch.source_lengths,
            batch.target_input,
            batch.target_output,
            label_smoothing,
            implementations,
        )

    def description(self) -> dict[str, Any]:
        """See :meth:`econmt.tasks.protocol.Task.description`."""
        sizes = {"source_size": self.source_size, "target_size": self.target_size}
        return {**self.recipe.model.model_dump(mode="json"), **sizes}

    def layers(self, model: nn.Module) -> dict[str, str]:
        """See :meth:`econmt.tasks.protocol.Task.layers`."""
        assert isinstance(model, TranslationModel)
        return model.parameter_layers()


def _random_ids(vocabulary: int, rows: int, positions: int) -> Tensor:
    """Ids (rows, positions) of no more different words than text has."""
    words = min(vocabulary - _FIRST_ID, most_distinct(rows * positions) or vocabulary)
    return torch.randint(_FIRST_ID, _FIRST_ID + max(1, words), (rows, positions))
