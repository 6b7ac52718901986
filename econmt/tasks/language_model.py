"""Language-model task: one text, a stack of recurrent layers, cross-entropy of each token given the previous ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from econmt.config.recipe import Recipe
from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.store import PreparedData
from econmt.data.batching.text_batches import TextBatch, TextBatches, whole_text
from econmt.model import Implementations
from econmt.model.activation_penalties import ActivationPenalties
from econmt.model.language_model import LanguageModel, build_language_model
from econmt.tasks.protocol import Evaluation, Figure, Shape, Split, random_ids

CONTEXT = 1000
"""Number of context tokens that each row of a text reads first, for a final figure."""

MOST_ROWS = 32
"""Maximum number of rows of a text for a final figure; each row has at least four times :data:`CONTEXT` tokens."""

MOST_TOKENS = 1024
"""Maximum number of tokens evaluated at once; each needs memory for a float per vocabulary entry."""


@dataclass(frozen=True)
class LanguageModelTask:
    """Task of language modelling, see :class:`econmt.tasks.protocol.Task`; ``size`` includes special tokens.

    A batch is a window over the rows of the text (:mod:`econmt.data.batching.text_batches`). The state of each row is
    carried to the next batch in buffers of the model (:class:`econmt.model.language_model.LanguageModel`), whose fixed
    addresses allow a step to be captured in a CUDA graph.
    """

    recipe: Recipe
    size: int
    name = "language_model"
    translates = False

    @property
    def sizes(self) -> tuple[int]:
        """Size of the vocabulary."""
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

        Windows need no more memory than a training batch. Perplexity is per word, including ends of lines, whatever
        the subwords. Rows start without context, or, if ``exact``, with :data:`CONTEXT` tokens of it.
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
        """See :meth:`econmt.tasks.protocol.Task.example`; ignores the source positions."""
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
        """See :meth:`econmt.tasks.protocol.Task.loss`; reads and updates the state of each row in the model."""
        assert isinstance(model, LanguageModel)
        assert isinstance(batch, TextBatch)
        training = self.recipe.training
        penalties = ActivationPenalties(
            training.activation_regularization, training.temporal_activation_regularization
        )
        texts = batch.inputs, batch.targets, batch.rows, batch.carries
        return model.loss(*texts, label_smoothing, implementations, penalties)

    def figures(self, model: nn.Module, prepared: PreparedData) -> list[Figure]:  # noqa: ARG002  there are none
        """See :meth:`econmt.tasks.protocol.Task.figures`."""
        return []

    def search_model(self, model: nn.Module) -> None:
        """See :meth:`econmt.tasks.protocol.Task.search_model`; a language model does not translate."""

    def description(self) -> dict[str, Any]:
        """See :meth:`econmt.tasks.protocol.Task.description`."""
        return {**self.recipe.model.model_dump(mode="json"), "task": self.name, "vocabulary_size": self.size}

    def layers(self, model: nn.Module) -> dict[str, str]:
        """See :meth:`econmt.tasks.protocol.Task.layers`."""
        assert isinstance(model, LanguageModel)
        return model.parameter_layers()
