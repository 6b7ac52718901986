"""Validation: perplexity, and translations made by the very code of ``econmt translate``, with their BLEU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from econmt.data.batches import valid_batches
from econmt.data.store import PreparedData
from econmt.data.token_store import TokenStore
from econmt.decoding.translator import Translator
from econmt.engine.precision import Precision
from econmt.evaluation.metrics import bleu
from econmt.memory.plan.planner import Plan
from econmt.model import Implementations, IncrementalModel, IncrementalState, TranslationModel
from econmt.recipe import Recipe
from econmt.tasks.protocol import Task
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
    task: Task,
    model: nn.Module,
    prepared: PreparedData,
    device: torch.device,
    precision: Precision,
    stop: Callable[[], bool],
    plan: Plan | None = None,
) -> Validation:
    """Perplexity of the validation text and, of a translation model if the recipe wants it, translations and BLEU.

    Args:
        task: what is learnt; its recipe says how translations are searched for, and of how many sentences.
        model: is put into evaluation mode and back into training mode.
        prepared: with the validation text raw, so that BLEU compares detokenised text with it.
        device: of the model.
        precision: of the perplexity, as in training.
        stop: asked often; True makes validation end at once.
        plan: of the run's byte budget, which validation obeys too; None: there is none.

    Raises:
        Abandoned: if ``stop`` said so.
    """
    recipe = task.recipe
    model.eval()
    try:
        value = perplexity(
            task, model, prepared.valid, recipe.decoding.batch_size, device, precision, stop, plan
        )
        count = recipe.training.decode_and_evaluate
        if count == 0 or not isinstance(model, TranslationModel):
            return Validation(value, float("nan"), "", None)
        count = len(prepared.valid_source) if count < 0 else count
        hypotheses = translate(model, prepared.valid_source[:count], prepared, recipe, device, stop, plan)
        score = bleu(hypotheses, prepared.valid_target[:count])
        return Validation(value, score.value, score.signature, hypotheses)
    finally:
        model.train()


def perplexity(
    task: Task,
    model: nn.Module,
    store: TokenStore,
    batch_size: int,
    device: torch.device,
    precision: Precision,
    stop: Callable[[], bool],
    plan: Plan | None = None,
) -> float:
    """Perplexity of a store's targets, end of sentence counted, without label smoothing."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    with torch.no_grad(), precision.products(device), precision.autocast(device):
        for whole in valid_batches(store, batch_size):
            for batch, how in divide(whole, plan, Implementations.of(task.recipe.ops)):
                if stop():
                    raise Abandoned
                loss = task.loss(model, batch.to(device), how)
                total += loss
                tokens += batch.target_tokens
    return perplexity_of(total.item() / tokens)


def translate(
    model: TranslationModel,
    lines: list[str],
    prepared: PreparedData,
    recipe: Recipe,
    device: torch.device,
    stop: Callable[[], bool],
    plan: Plan | None = None,
) -> list[str]:
    """Translations of raw lines, detokenised.

    In float32, as those of the test text are when a run ends: the precision that ``econmt translate`` takes by itself
    comes from a measurement, and a run that goes on elsewhere must find the BLEU that it would have found here.
    """
    translator = Translator(
        [_Stoppable(IncrementalModel(model), stop)],
        prepared.vocabularies,
        recipe.decoding,
        device,
        batch_size=None if plan is None else plan.decoding_rows,
        max_length=recipe.data.max_length,
    )
    return [translation.text for translation in translator.translate(lines)]


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
