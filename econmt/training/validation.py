"""Validation: perplexity, and translations made by the very code of ``econmt translate``, with their BLEU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.checkpoint.state import COLUMNS, TrainingState
from econmt.config.recipe import Recipe
from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.batches import Batch, longer_than
from econmt.data.batching.store import PreparedData
from econmt.data.text.subwords import Vocabularies
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.search.model import SearchModel
from econmt.decoding.translator import Translator
from econmt.engine.communicator import Communicator
from econmt.engine.devices import resolve_device
from econmt.engine.step import TrainingStep
from econmt.errors import InputError
from econmt.evaluation.metrics import Score, bleu, corpus_score, make_metric, recipe_tokenizer
from econmt.memory.plan.planner import MemoryPlan
from econmt.model import Implementations, IncrementalModel, TranslationModel
from econmt.tasks.protocol import Evaluation
from econmt.training.budget import divide
from econmt.training.progress import Progress
from econmt.training.progress import perplexity as perplexity_of


class Abandoned(Exception):  # noqa: N818  not an error
    """Validation was left because the run has to end now."""


class Validation(NamedTuple):
    """Validation scores of a checkpoint; without translations BLEU is NaN and the signature empty.

    ``judged`` is the metric of translations that decides, if it is another one than BLEU, with its column;
    ``length_loss`` that of a length task, a target token, without the recipe's weight.
    """

    perplexity: float
    bleu: float
    signature: str
    hypotheses: list[str] | None
    judged: tuple[str, Score] | None = None
    length_loss: float | None = None

    def columns(self) -> dict[str, float]:
        """The figures under their names in metrics.tsv."""
        more = {} if self.judged is None else {self.judged[0]: self.judged[1].value}
        if self.length_loss is not None:
            more["valid_length_loss"] = self.length_loss
        return {"valid_perplexity": self.perplexity, "bleu": self.bleu, **more}


def validate(
    step: TrainingStep,
    prepared: PreparedData,
    stop: Callable[[], bool],
    plan: MemoryPlan | None = None,
    signature: str = "",
) -> Validation:
    """Perplexity of the validation text and, of a translation model if the recipe wants it, translations and BLEU.

    Ranks share the work, and all get the result, which is the same whatever their number.

    Args:
        step: whose model is put into evaluation mode and back into training mode.
        prepared: with the validation text raw, so that BLEU compares detokenised text with it.
        stop: asked often; True makes validation end at once.
        plan: of the run's byte budget, which validation obeys too; None: there is none.
        signature: of the BLEU before, which goes on being measured so.

    Raises:
        Abandoned: if ``stop`` said so.
    """
    model, count = step.model, step.task.recipe.training.decode_and_evaluate
    model.eval()
    try:
        value = perplexity(step, step.task.evaluation(prepared, "valid"), stop, plan)
        lengths = None
        if isinstance(model, TranslationModel) and model.length_ratio is not None:
            lengths = length_loss(step, step.task.evaluation(prepared, "valid"), stop, plan)
        if count == 0 or not (step.task.translates and isinstance(model, TranslationModel)):
            return Validation(value, float("nan"), "", None, length_loss=lengths)
        count = len(prepared.valid_source) if count < 0 else count
        recipe, device = step.task.recipe, step.device
        if recipe.training.decode_and_evaluate_device is not None:
            device = resolve_device(recipe.training.decode_and_evaluate_device)
        there = model if _numbered(device) == _numbered(step.device) else copy.deepcopy(model).to(device)
        translator = make_translator(
            IncrementalModel(there), prepared.vocabularies, recipe, device, plan, stop
        )
        requests = requests_of(prepared.valid_source[:count], prepared.valid_factors)
        hypotheses = _translated(step.communicator, translator, requests)
        references = prepared.valid_target[:count]
        score = bleu(hypotheses, references, recipe_tokenizer(recipe, signature).name)
        metric, judged = recipe.training.early_stopping.metric, None
        if metric in ("chrf", "ter"):
            judged = metric, corpus_score(make_metric(metric, [references]), hypotheses)
        return Validation(value, score.value, score.signature, hypotheses, judged, lengths)
    finally:
        model.train()


def _numbered(device: torch.device) -> torch.device:
    """The device; of "cuda" the current GPU by its number, which is another device to PyTorch."""
    unnamed = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if unnamed else device


def requests_of(sources: Sequence[str], factors: Sequence[Sequence[str]]) -> list[Request]:
    """Makes requests for a translator from lines and their source factors."""
    rows = zip(*factors, strict=True) if factors else repeat(())
    return [Request(text, factors=row) for text, row in zip(sources, rows, strict=False)]


def _translated(communicator: Communicator, translator: Translator, sources: Sequence[Request]) -> list[str]:
    """Translations of all sources, of which each rank makes each so many-th."""
    own: list[str] = []
    given_up = False
    try:
        own = [found.text for found in translator.translate(sources[communicator.rank :: communicator.size])]
    except Abandoned:
        given_up = True
    found = _gathered(communicator, own, given_up)
    translations = [""] * len(sources)
    for rank, part in enumerate(found):
        translations[rank :: communicator.size] = part
    return translations


def _gathered(communicator: Communicator, own: list[Any], given_up: bool) -> list[list[Any]]:
    """Gathers the results of all ranks, in their order.

    Raises:
        Abandoned: one has left it.
    """
    found: list[Any] = communicator.gather([given_up, own], patient=True)
    if any(left for left, _ in found):
        raise Abandoned
    return [part for _, part in found]


def perplexity(
    step: TrainingStep,
    evaluation: Evaluation,
    stop: Callable[[], bool] = lambda: False,
    plan: MemoryPlan | None = None,
    implementations: Implementations | None = None,
) -> float:
    """Perplexity of a text, ends of sentences or lines counted, without label smoothing.

    Ranks deal batches out; of batches that go on with a state each has some rows. Losses are added up in one order,
    whatever the number of ranks.

    Args:
        step: whose model is in evaluation mode.
        evaluation: of the text.
        stop, plan: see :func:`validate`.
        implementations: of the ops, without a plan; None: those of the recipe.
    """
    given = implementations or Implementations.of(step.task.recipe.ops)
    total, tokens = _summed(step, evaluation, partial(step.task.loss, step.model), stop, plan, given)
    return perplexity_of(total / (evaluation.words or tokens))


def length_loss(
    step: TrainingStep,
    evaluation: Evaluation,
    stop: Callable[[], bool] = lambda: False,
    plan: MemoryPlan | None = None,
) -> float:
    """The loss of a model's length task, a target token; see :func:`perplexity`."""
    model = step.model
    assert isinstance(model, TranslationModel)

    def of(batch: AnyBatch, how: Implementations) -> Tensor:
        assert isinstance(batch, Batch)
        return model.length_loss(model.encode(batch.source, batch.source_lengths, how), batch.target_output)

    given = Implementations.of(step.task.recipe.ops)
    total, tokens = _summed(step, evaluation, of, stop, plan, given)
    return total / tokens


def _summed(
    step: TrainingStep,
    evaluation: Evaluation,
    loss: Callable[[AnyBatch, Implementations], Tensor],
    stop: Callable[[], bool],
    plan: MemoryPlan | None,
    given: Implementations,
) -> tuple[float, int]:
    """The sum of a loss over the batches of all ranks, and their target tokens."""
    precision, device, communicator = step.precision, step.device, step.communicator
    losses: list[Tensor] = []
    numbers: list[int] = []
    tokens, given_up = 0, False
    try:
        with torch.no_grad(), precision.products(device), precision.autocast(device):
            for number, whole in enumerate(evaluation.batches):
                tokens += whole.target_tokens
                if not evaluation.consecutive and number % communicator.size != communicator.rank:
                    continue
                own = whole
                if evaluation.consecutive and communicator.size > 1:
                    own = whole.share(communicator.rank, communicator.size).renumbered()
                for batch, how in divide(own, plan, given):
                    if stop():
                        raise Abandoned
                    losses.append(loss(batch.to(device), how))
                    numbers.append(number)
    except Abandoned:
        given_up = True
    values: list[float] = torch.stack(losses).double().tolist() if losses else []
    found = _gathered(communicator, list(zip(numbers, values, strict=True)), given_up)
    total = 0.0
    for _, value in sorted(chain.from_iterable(found), key=itemgetter(0)):
        total += value
    return total, tokens


def check_lengths(prepared: PreparedData, recipe: Recipe) -> list[str]:
    """Returns notes on validation pairs that are too long, one line each.

    Raises:
        InputError: if all of them are.
    """
    if recipe.task != "translation":
        return []
    most = recipe.decoding.max_input_length
    count, pairs = int(longer_than(prepared.valid, most).sum()), len(prepared.valid)
    if count == 0:
        return []
    what = f"{count:,} of {pairs:,} validation pairs have more tokens than decoding.max_input_length {most:,}"
    if count == pairs:
        raise InputError(f"{what}: none is left to validate with; raise it, or give other text as data.valid")
    return [
        f"{what}: the perplexity is that of the others, and of longer sources the beginning is translated"
    ]


def make_translator(
    model: SearchModel,
    vocabularies: Vocabularies,
    recipe: Recipe,
    device: torch.device,
    plan: MemoryPlan | None,
    stop: Callable[[], bool] = lambda: False,
) -> Translator:
    """Creates the translator of a run's validation and test text.

    In float32: the precision that ``econmt translate`` takes by itself may come from a measurement, and a run that goes
    on elsewhere must find the BLEU that it would have found here.
    """

    def watch() -> None:
        if stop():
            raise Abandoned

    return Translator(
        [model],
        vocabularies,
        replace(SearchOptions.from_recipe(recipe.decoding), attention=False),
        device,
        batch_size=recipe.decoding.batch_size if plan is None else plan.decoding_rows,
        max_length=recipe.pairs.max_length,
        max_input_length=recipe.decoding.max_input_length,
        watch=watch,
        continuous=None if plan is None else False,  # the plan does not count on graphs
    )


def tell(progress: Progress, result: Validation, state: TrainingState, *, goes_back: bool) -> None:
    """Tells a person how the newest checkpoint is.

    Args:
        progress: to whom.
        result: of its validation.
        state: with the checkpoint in it.
        goes_back: whether training goes on from the best checkpoint instead.
    """
    improved = state.best_update == state.update
    parts = [f"checkpoint {state.update}: validation perplexity {result.perplexity:.2f}"]
    if result.signature:
        parts.append(f"BLEU {result.bleu:.2f}")
    if result.judged is not None:
        score = result.judged[1]
        parts.append(f"{score.name} {score.value:.2f} ({score.signature})")
    if result.length_loss is not None:
        parts.append(f"length loss {result.length_loss:.4f}")
    best = "the best so far" if improved else f"best is checkpoint {state.best_update}"
    parts.append(
        best if improved or not goes_back else f"{best}; training goes back to it, learning rate reduced"
    )
    progress.note(", ".join(parts))
    scalars = {"valid/perplexity": result.perplexity}
    if result.signature:
        scalars["valid/bleu"] = result.bleu
    scalars |= {f"valid/{name}": value for name, value in state.metrics[-1].items() if name not in COLUMNS}
    progress.scalars(scalars, state.update)
