"""Validation: perplexity, and translations made by the very code of ``econmt translate``, with their BLEU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.data.batches import valid_batches
from econmt.data.store import PreparedData
from econmt.data.subwords import Vocabularies
from econmt.data.token_store import TokenStore
from econmt.decoding.search_model import SearchModel
from econmt.decoding.translator import Translator
from econmt.engine.step import TrainingStep
from econmt.evaluation.metrics import bleu
from econmt.memory.plan.planner import Plan
from econmt.model import Implementations, IncrementalModel, IncrementalState, TranslationModel
from econmt.recipe import Recipe
from econmt.training.budget import divide
from econmt.training.progress import perplexity as perplexity_of


class Abandoned(Exception):  # noqa: N818  not an error
    """Validation was left because the run has to end now."""


class Validation(NamedTuple):
    """What a checkpoint is judged by; without translations BLEU is not a number and the signature empty."""

    perplexity: float
    bleu: float
    signature: str
    hypotheses: list[str] | None


def validate(
    step: TrainingStep, prepared: PreparedData, stop: Callable[[], bool], plan: Plan | None = None
) -> Validation:
    """Perplexity of the validation text and, of a translation model if the recipe wants it, translations and BLEU.

    Args:
        step: whose model is put into evaluation mode and back into training mode.
        prepared: with the validation text raw, so that BLEU compares detokenised text with it.
        stop: asked often; True makes validation end at once.
        plan: of the run's byte budget, which validation obeys too; None: there is none.

    Raises:
        Abandoned: if ``stop`` said so.
    """
    model, count = step.model, step.task.recipe.training.decode_and_evaluate
    model.eval()
    try:
        value = perplexity(step, prepared.valid, stop, plan)
        if count == 0 or not isinstance(model, TranslationModel):
            return Validation(value, float("nan"), "", None)
        count = len(prepared.valid_source) if count < 0 else count
        searched = _Stoppable(IncrementalModel(model), stop)
        translator = make_translator(searched, prepared.vocabularies, step.task.recipe, step.device, plan)
        hypotheses = [found.text for found in translator.translate(prepared.valid_source[:count])]
        score = bleu(hypotheses, prepared.valid_target[:count])
        return Validation(value, score.value, score.signature, hypotheses)
    finally:
        model.train()


def perplexity(
    step: TrainingStep, store: TokenStore, stop: Callable[[], bool], plan: Plan | None = None
) -> float:
    """Perplexity of a store's targets, end of sentence counted, without label smoothing."""
    task, precision, device = step.task, step.precision, step.device
    given = Implementations.of(task.recipe.ops)
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    with torch.no_grad(), precision.products(device), precision.autocast(device):
        for whole in valid_batches(store, task.recipe.decoding.batch_size):
            for batch, how in divide(whole, plan, given):
                if stop():
                    raise Abandoned
                total += task.loss(step.model, batch.to(device), how)
                tokens += batch.target_tokens
    return perplexity_of(total.item() / tokens)


def make_translator(
    model: SearchModel,
    vocabularies: Vocabularies,
    recipe: Recipe,
    device: torch.device,
    plan: Plan | None,
) -> Translator:
    """What translates validation and test text of a run.

    In float32: the precision that ``econmt translate`` takes by itself may come from a measurement, and a run that goes
    on elsewhere must find the BLEU that it would have found here.
    """
    return Translator(
        [model],
        vocabularies,
        recipe.decoding,
        device,
        batch_size=None if plan is None else plan.decoding_rows,
        max_length=recipe.data.max_length,
    )


class _Stoppable:
    """A model that leaves a search between two of its steps."""

    def __init__(self, model: IncrementalModel, stop: Callable[[], bool]) -> None:
        self._model = model
        self._stop = stop
        self.encode = model.encode
        self.initial_state = model.initial_state

    def step(self, tokens: Tensor, state: IncrementalState) -> tuple[Tensor, Tensor, IncrementalState]:
        if self._stop():
            raise Abandoned
        return self._model.step(tokens, state)
