"""Language modelling: one text, a stack of layers, the cross-entropy of each token given those before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from econmt.config.recipe import Recipe
from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.store import PreparedData
from econmt.data.batching.text_batches import TextBatch, TextBatches, whole_text
from econmt.data.text.subwords import Vocabularies
from econmt.model import Implementations
from econmt.model.language_model import LanguageModel, build_language_model
from econmt.tasks.protocol import Evaluation, Shape, Split, random_ids

CONTEXT = 1000
"""Number of tokens before its own that each row of a text reads first, for a final figure."""

MOST_ROWS = 32
"""Most rows that a text is cut into for a final figure; each has at least four times :data:`CONTEXT` of its own."""


MOST_TOKENS = 1024
"""Most tokens of all rows together that are evaluated at once: each takes a float of every word of the vocabulary."""


@dataclass(frozen=True)
class LanguageModelTask:
    """See :class:`econmt.tasks.protocol.Task`.

    A batch is a window over the rows of the text (:mod:`econmt.data.batching.text_batches`); the state that each row leaves is
    carried to the next batch inside the model (:class:`econmt.model.language_model.LanguageModel`), on the device and
    always at the same place: a step asks nothing of the processor and can be captured in a CUDA graph.

    Args:
        recipe: the run.
        size: of the vocabulary, special symbols counted.
    """

    recipe: Recipe
    size: int
    name = "language_model"
    translates = False

    @classmethod
    def of(cls, recipe: Recipe, vocabularies: Vocabularies) -> LanguageModelTask:
        """The task of a recipe with its vocabulary."""
        return cls(recipe, vocabularies.target.size)

    @property
    def sizes(self) -> tuple[int]:
        """Entries of the vocabulary."""
        return (self.size,)

    def build_model(self) -> LanguageModel:
        """See :meth:`econmt.tasks.protocol.Task.build_model`."""
        return build_language_model(self.recipe, self.size, self.recipe.training.batch.size)

    def batches(self, prepared: PreparedData) -> TextBatches:
        """See :meth:`econmt.tasks.protocol.Task.batches`."""
        training = self.recipe.training
        return TextBatches(
            prepared.train,
            training.batch.size,
            training.bptt,
            jitter=training.bptt_jitter,
            seed=training.seed,
        )

    def evaluation(self, prepared: PreparedData, split: Split, *, exact: bool = False) -> Evaluation:
        """See :meth:`econmt.tasks.protocol.Task.evaluation`.

        Windows take no more memory than a training batch. Perplexity is per word, ends of lines counted, whatever the
        subwords. Rows begin without what stands before them, or, if ``exact``, after :data:`CONTEXT` tokens of it.
        """
        training = self.recipe.training
        store = prepared.valid if split == "valid" else prepared.test
        assert store is not None
        rows, context = min(training.valid_rows, store.total_tokens), 0
        if exact:
            rows, context = min(max(store.total_tokens // (4 * CONTEXT), 1), MOST_ROWS), CONTEXT
        window = max(1, min(training.batch.size * training.bptt, MOST_TOKENS) // rows)
        words = int(prepared.statistics[split]["words"])
        return Evaluation(whole_text(store, rows, window, context), words, consecutive=True)

    def example(self, shape: Shape) -> TextBatch:
        """See :meth:`econmt.tasks.protocol.Task.example`; the source positions are not looked at."""
        rows, _, tokens = shape
        return TextBatch(
            indices=torch.arange(rows),
            target_tokens=rows * tokens,
            inputs=random_ids(self.size, rows, tokens),
            targets=random_ids(self.size, rows, tokens),
            rows=torch.arange(1, rows + 1),
            carries=torch.ones(rows, dtype=torch.int64),
        )

    def loss(
        self,
        model: nn.Module,
        batch: AnyBatch,
        implementations: Implementations,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """See :meth:`econmt.tasks.protocol.Task.loss`; each row's state is read and left in the model."""
        assert isinstance(model, LanguageModel)
        assert isinstance(batch, TextBatch)
        return model.loss(
            batch.inputs, batch.targets, batch.rows, batch.carries, label_smoothing, implementations
        )

    def description(self) -> dict[str, Any]:
        """See :meth:`econmt.tasks.protocol.Task.description`."""
        return {**self.recipe.model.model_dump(mode="json"), "task": self.name, "vocabulary_size": self.size}

    def layers(self, model: nn.Module) -> dict[str, str]:
        """See :meth:`econmt.tasks.protocol.Task.layers`."""
        assert isinstance(model, LanguageModel)
        return model.parameter_layers()
