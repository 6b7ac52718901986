"""Translation task: sentence pairs, an attention-LSTM model, cross-entropy of the target tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from econmt.config.recipe import Recipe
from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.batches import Batch, BatchIterator, training_batches, valid_batches
from econmt.data.batching.pair_guides import PairGuides
from econmt.data.batching.store import PreparedData
from econmt.data.text.guides import WEIGHT_UNIT
from econmt.factored_ids import joined_ids
from econmt.model import Implementations, IncrementalModel, TranslationModel, build_model
from econmt.model.guided_alignment import TrainingGuides
from econmt.tasks.protocol import Evaluation, Figure, Shape, Split, random_ids


@dataclass(frozen=True)
class TranslationTask:
    """Task of translation, see :class:`econmt.tasks.protocol.Task`; sizes of vocabularies include special tokens."""

    recipe: Recipe
    source_size: int
    target_size: int
    factor_sizes: tuple[int, ...] = field(default=(), kw_only=True)
    name = "translation"
    translates = True

    @classmethod
    def of_sizes(
        cls, recipe: Recipe, source_size: int, target_size: int, *factor_sizes: int
    ) -> TranslationTask:
        """Creates the task of a recipe from its :attr:`sizes`."""
        return cls(recipe, source_size, target_size, factor_sizes=factor_sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the source vocabulary, the target vocabulary and each stream of source factors."""
        return self.source_size, self.target_size, *self.factor_sizes

    def build_model(self) -> TranslationModel:
        """See :meth:`econmt.tasks.protocol.Task.build_model`."""
        return build_model(self.recipe, self.source_size, self.target_size, self.factor_sizes)

    def batches(self, prepared: PreparedData) -> BatchIterator:
        """See :meth:`econmt.tasks.protocol.Task.batches`."""
        return training_batches(self.recipe, prepared)

    def evaluation(
        self,
        prepared: PreparedData,
        split: Split,
        *,
        exact: bool = False,  # noqa: ARG002  always exact
    ) -> Evaluation:
        """See :meth:`econmt.tasks.protocol.Task.evaluation`; leaves out pairs that are too long."""
        store = prepared.valid if split == "valid" else prepared.test
        assert store is not None
        decoding, links = self.recipe.decoding, prepared.valid_links if split == "valid" else None
        guides = PairGuides.of(store, links, prepared.vocabularies)
        return Evaluation(valid_batches(store, decoding.batch_size, decoding.max_input_length, guides))

    def example(self, shape: Shape) -> Batch:
        """See :meth:`econmt.tasks.protocol.Task.example`."""
        rows, source, target = shape
        data = self.recipe.pairs
        words = random_ids(self.source_size, rows, source)
        # Factors are a function of the word, so that there are no more distinct joint ids than words.
        factors = [words % size for size in self.factor_sizes]
        return Batch(
            source=joined_ids(words, factors, (self.source_size, *self.factor_sizes)),
            source_lengths=torch.full((rows,), source),
            target_input=random_ids(self.target_size, rows, target),
            target_output=random_ids(self.target_size, rows, target),
            target_lengths=torch.full((rows,), target),
            indices=torch.arange(rows),
            source_tokens=rows * source,
            target_tokens=rows * target,
            alignment=None if data.alignment is None else torch.ones(rows, target, source, dtype=torch.int64),
            weights=None if data.weights is None else torch.full((rows,), round(1.0 / WEIGHT_UNIT)),
        )

    def loss(
        self,
        model: nn.Module,
        batch: AnyBatch,
        implementations: Implementations,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """See :meth:`econmt.tasks.protocol.Task.loss`; the end of a sentence counts as a target token.

        If the model is in training mode, weights apply, and the loss of guided alignment is added.
        """
        assert isinstance(model, TranslationModel)
        assert isinstance(batch, Batch)
        guides = None
        if model.training:
            weights = None if batch.weights is None else batch.weights.to(torch.float32) * WEIGHT_UNIT
            guides = TrainingGuides(batch.alignment, self.recipe.training.guided_alignment_weight, weights)
        return model.loss(
            batch.source,
            batch.source_lengths,
            batch.target_input,
            batch.target_output,
            label_smoothing,
            implementations,
            guides,
        )

    def figures(self, model: nn.Module, prepared: PreparedData) -> list[Figure]:
        """See :meth:`econmt.tasks.protocol.Task.figures`: alignment loss, and accuracy if it decides about stopping."""
        assert isinstance(model, TranslationModel)

        def alignment_loss(batch: AnyBatch, implementations: Implementations) -> Tensor:
            assert isinstance(batch, Batch)
            assert batch.alignment is not None
            source = batch.source, batch.source_lengths
            return model.alignment_loss(*source, batch.target_input, batch.alignment, implementations)

        def correct(batch: AnyBatch, _: Implementations) -> Tensor:
            assert isinstance(batch, Batch)
            positions = batch.target_output != model.pad
            predictions = model.predict(batch.source, batch.source_lengths, batch.target_input, positions)
            return predictions.correct(batch.target_output[positions])

        figures = [Figure("valid_alignment_loss", alignment_loss)] if prepared.valid_links is not None else []
        if self.recipe.training.early_stopping.metric == "accuracy":
            figures.append(Figure("valid_accuracy", correct, scale=100.0))
        return figures

    def search_model(self, model: nn.Module) -> IncrementalModel:
        """See :meth:`econmt.tasks.protocol.Task.search_model`."""
        assert isinstance(model, TranslationModel)
        return IncrementalModel(model)

    def description(self) -> dict[str, Any]:
        """See :meth:`econmt.tasks.protocol.Task.description`."""
        sizes = {"source_size": self.source_size, "target_size": self.target_size}
        factors = {"factor_sizes": list(self.factor_sizes)} if self.factor_sizes else {}
        return {**self.recipe.model.model_dump(mode="json"), **sizes, **factors}

    def layers(self, model: nn.Module) -> dict[str, str]:
        """See :meth:`econmt.tasks.protocol.Task.layers`."""
        assert isinstance(model, TranslationModel)
        return model.parameter_layers()
