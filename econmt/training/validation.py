"""Validates a model: perplexity, and translations with the code of ``econmt translate`` and their BLEU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.budget.planner import MemoryPlan
from econmt.budget.run_budget import divide
from econmt.checkpoint.state import COLUMNS, TrainingState
from econmt.config.optimizer import METRICS
from econmt.config.recipe import Recipe
from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.batches import longer_than
from econmt.data.batching.store import PreparedData
from econmt.data.files import notice
from econmt.data.text.vocabulary import Vocabularies
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.search.model import SearchModel
from econmt.decoding.text_reader import perplexity_of
from econmt.decoding.translator import Translator
from econmt.engine.communicator import Communicator
from econmt.engine.step import TrainingStep
from econmt.errors import InputError
from econmt.evaluation.metrics import Score, bleu, corpus_score, make_metric, recipe_tokenizer
from econmt.model import Implementations
from econmt.tasks.protocol import Evaluation
from econmt.training.hooks import Hook, HookError, Judged
from econmt.training.progress import Progress

_NOTABLE = 0.01
"""Share of validation pairs, longer than those of the training text, from which they are told."""


class Abandoned(Exception):  # noqa: N818  not an error
    """Validation was abandoned because the run has to stop now."""


class Validation(NamedTuple):
    """Scores of a checkpoint; without translations BLEU is NaN and its signature is empty.

    ``judged`` is the deciding metric if it is chrF or TER, with its column; ``others`` are further figures by column:
    the accuracy, the figure of the validation hook, and the loss of guided alignment per target token, without the
    recipe's weight.
    """

    perplexity: float
    bleu: float
    signature: str
    hypotheses: list[str] | None
    judged: tuple[str, Score] | None = None
    others: Mapping[str, float] = MappingProxyType({})

    def columns(self) -> dict[str, float]:
        """Returns the scores by their column names in metrics.tsv."""
        optional = {} if self.judged is None else {self.judged[0]: self.judged[1].value}
        return {"valid_perplexity": self.perplexity, "bleu": self.bleu, **optional, **self.others}


def validate(
    step: TrainingStep,
    prepared: PreparedData,
    plan: MemoryPlan | None = None,
    signature: str = "",
    update: int = 0,
    *,
    stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], object] = lambda _: None,
    hook: Hook | None = None,
) -> Validation:
    """Computes perplexity on the validation text and, for a translation model if the recipe asks for it, BLEU.

    Ranks share the work and all return the same result, which does not depend on their number.

    Args:
        step: Training step, whose model is switched to evaluation mode and back.
        prepared: Prepared text, with raw validation text, so that BLEU compares detokenized text with it.
        plan: Plan of the run's memory budget, which validation respects too; None without one.
        signature: Signature of earlier BLEU scores, which determines the tokenizer.
        update: Update of the checkpoint, for the hook.
        stop: Polled often; if it returns True, validation ends at once.
        say: Called with the current activity, for display.
        hook: Judges the translations.

    Raises:
        Abandoned: ``stop`` returned True.
    """
    model, count = step.model, step.task.recipe.training.decode_and_evaluate
    model.eval()
    say("validation: computing the perplexity")
    try:
        value = perplexity(step, step.task.evaluation(prepared, "valid"), stop, plan)
        metric, others = step.task.recipe.training.early_stopping.metric, dict[str, float]()
        for figure in step.task.figures(model, prepared):
            evaluation = step.task.evaluation(prepared, "valid")
            total, tokens = _summed(step, evaluation, figure.sum, stop, plan)
            others[figure.column] = figure.scale * (total / tokens)
        searched = step.task.search_model(model)
        if count == 0 or searched is None:
            return Validation(value, float("nan"), "", None, others=others)
        count = len(prepared.valid_text.source) if count < 0 else count
        recipe = step.task.recipe
        translator = make_translator(searched, prepared.vocabularies, recipe, step.device, plan, stop)
        requests = requests_of(prepared.valid_text.source[:count], prepared.valid_text.factors)
        hypotheses = _translated(step.communicator, translator, requests, say)
        references = prepared.valid_text.target[:count]
        score = bleu(hypotheses, references, recipe_tokenizer(recipe, signature).name)
        judged = None
        if metric in ("chrf", "ter"):
            judged = metric, corpus_score(make_metric(metric, [references]), hypotheses)
        if hook is not None:
            source, reference = (prepared.folder / f"valid.{side}.txt" for side in ("source", "target"))
            hooked = Judged(hypotheses, source, reference, update)
            others["hook"] = _hooked(step.communicator, hook, hooked, stop, say)
        return Validation(value, score.value, score.signature, hypotheses, judged, others)
    finally:
        model.train()


def _hooked(
    communicator: Communicator,
    hook: Hook,
    judged: Judged,
    stop: Callable[[], bool],
    say: Callable[[str], object],
) -> float:
    """Returns the figure of the hook, which rank 0 asks; NaN, with a warning, if it fails."""

    def ask() -> list[float]:
        if not communicator.is_rank_zero:
            return []
        say("validation: waiting for the validation hook")
        try:
            return [hook(judged, stop)]
        except HookError as error:
            notice(f"warning: validation hook: {error}; this checkpoint has no figure")
            return [math.nan]
        except InterruptedError:
            raise Abandoned from None

    return float(_gathered(communicator, ask)[0][0])


def requests_of(sources: Sequence[str], factors: Sequence[Sequence[str]]) -> list[Request]:
    """Returns translation requests for the lines of a text, with those of each source factor stream."""
    rows = zip(*factors, strict=True) if factors else repeat(())
    return [Request(text, factors=row) for text, row in zip(sources, rows, strict=False)]


def _translated(
    communicator: Communicator,
    translator: Translator,
    sources: Sequence[Request],
    say: Callable[[str], object],
) -> list[str]:
    """Translates all sources, divided evenly among the ranks."""
    local = sources[communicator.rank :: communicator.size]
    done = counted_sentences("validation", len(local), say)
    parts = _gathered(communicator, lambda: [each.text for each in translator.translate(local, done=done)])
    translations = [""] * len(sources)
    for rank, part in enumerate(parts):
        translations[rank :: communicator.size] = part
    return translations


def counted_sentences(title: str, total: int, say: Callable[[str], object]) -> Callable[[int], None]:
    """Returns a function that takes numbers of further translated sentences, and says how many there are so far."""
    translated = 0

    def done(count: int) -> None:
        nonlocal translated
        translated += count
        say(f"{title}: {translated:,} of {total:,} sentences translated")

    return done


def _gathered(communicator: Communicator, compute: Callable[[], list[Any]]) -> list[list[Any]]:
    """Calls a function on every rank and gathers the results of all ranks, in rank order.

    Raises:
        Abandoned: The function raised it on some rank; raised on every rank.
    """
    local, abandoned = [], False
    try:
        local = compute()
    except Abandoned:
        abandoned = True
    gathered: list[Any] = communicator.gather([abandoned, local], patient=True)
    if any(stopped for stopped, _ in gathered):
        raise Abandoned
    return [part for _, part in gathered]


def perplexity(
    step: TrainingStep,
    evaluation: Evaluation,
    stop: Callable[[], bool] = lambda: False,
    plan: MemoryPlan | None = None,
    implementations: Implementations | None = None,
) -> float:
    """Computes the perplexity of a text, including ends of sentences or lines, without label smoothing.

    Batches are distributed over ranks; if batches carry a state, their rows are. Losses are added up in the same order
    for any number of ranks.

    Args:
        step: Training step, whose model is in evaluation mode.
        stop, plan: See :func:`validate`.
        implementations: Implementations of the ops without a plan; None: those of the recipe.
    """
    total, tokens = _summed(
        step, evaluation, partial(step.task.loss, step.model), stop, plan, implementations
    )
    return perplexity_of(-total, evaluation.words or tokens)


def _summed(
    step: TrainingStep,
    evaluation: Evaluation,
    loss: Callable[[AnyBatch, Implementations], Tensor],
    stop: Callable[[], bool],
    plan: MemoryPlan | None,
    implementations: Implementations | None = None,
) -> tuple[float, int]:
    """Sums a loss over the batches of all ranks; returns the sum and the number of target tokens."""
    precision, device, communicator = step.precision, step.device, step.communicator
    chosen = implementations or Implementations.of(step.task.recipe.ops)
    tokens = 0

    def compute() -> list[tuple[int, float]]:
        nonlocal tokens
        numbers, losses = [], []
        with torch.no_grad(), precision.products(device), precision.autocast(device):
            for number, full_batch in enumerate(evaluation.batches):
                tokens += full_batch.target_tokens
                if not evaluation.consecutive and number % communicator.size != communicator.rank:
                    continue
                local = full_batch
                if evaluation.consecutive and communicator.size > 1:
                    local = full_batch.share(communicator.rank, communicator.size).renumbered()
                for batch, batch_implementations in divide(local, plan, chosen):
                    if stop():
                        raise Abandoned
                    losses.append(loss(batch.to(device), batch_implementations))
                    numbers.append(number)
        return list(zip(numbers, torch.stack(losses).double().tolist() if losses else [], strict=True))

    gathered = chain.from_iterable(_gathered(communicator, compute))
    total = 0.0
    for _, value in sorted(gathered, key=itemgetter(0)):  # sum() rounds differently in Python 3.12
        total += value
    return total, tokens


def check_lengths(prepared: PreparedData, recipe: Recipe, translates: bool) -> list[str]:
    """Checks validation pairs for excessive length; returns messages, one line each.

    Raises:
        InputError: All pairs are too long.
    """
    if not translates:
        return []
    pairs, usual, limit = len(prepared.valid), recipe.pairs.max_length, recipe.decoding.max_input_length
    notes, untrained = [], int(longer_than(prepared.valid, usual).sum())
    if untrained >= _NOTABLE * pairs:
        notes.append(
            f"{untrained:,} of {pairs:,} validation pairs have more tokens than data.max_length {usual:,}: training "
            "leaves such pairs out, and their translations may be poor"
        )
    count = int(longer_than(prepared.valid, limit).sum())
    if count == 0:
        return notes
    problem = (
        f"{count:,} of {pairs:,} validation pairs have more tokens than decoding.max_input_length {limit:,}"
    )
    if count == pairs:
        raise InputError(
            f"{problem}: no pair remains for validation; raise it, or use other text as data.valid"
        )
    notes.append(
        f"{problem}: perplexity leaves them out, and only the beginning of longer sources is translated"
    )
    return notes


def make_translator(
    model: SearchModel,
    vocabularies: Vocabularies,
    recipe: Recipe,
    device: torch.device,
    plan: MemoryPlan | None,
    stop: Callable[[], bool] = lambda: False,
) -> Translator:
    """Creates the translator of a run's validation and test text.

    It computes in float32: the precision that ``econmt translate`` chooses may depend on a measurement, and BLEU must
    not depend on the machine on which a run is resumed.
    """

    def poll() -> None:
        if stop():
            raise Abandoned

    options = SearchOptions.from_recipe(recipe.decoding).changed(attention=False)
    if plan is not None:  # the plan has no memory for CUDA graphs
        options = options.changed(batch_size=plan.decoding_rows, continuous=False)
    translator = Translator([model], vocabularies, options, device, data=recipe.pairs)
    translator.poll = poll
    return translator


def report_checkpoint(
    progress: Progress, result: Validation, state: TrainingState, *, goes_back: bool
) -> None:
    """Reports the newest checkpoint; ``goes_back``: training returns to the best one."""
    improved = state.best_update == state.update
    parts = [f"checkpoint {state.update}: validation perplexity {result.perplexity:.2f}"]
    if result.signature:
        parts.append(f"BLEU {result.bleu:.2f}")
    if result.judged is not None:
        score = result.judged[1]
        parts.append(f"{score.name} {score.value:.2f} ({score.signature})")
    titles = {metric.column: metric.title for metric in METRICS.values()}
    for column, value in result.others.items():
        title = titles.get(column, column.removeprefix("valid_").replace("_", " "))
        parts.append(f"{title} {value:.4f}")
    best = "the best so far" if improved else f"best is checkpoint {state.best_update}"
    back = "it" if state.best_regular == state.best_update else f"checkpoint {state.best_regular}"
    parts.append(f"{best}; training returns to {back} with a reduced learning rate" if goes_back else best)
    progress.note(", ".join(parts))
    scalars = {"valid/perplexity": result.perplexity}
    if result.signature:
        scalars["valid/bleu"] = result.bleu
    scalars |= {f"valid/{name}": value for name, value in state.metrics[-1].items() if name not in COLUMNS}
    progress.scalars(scalars, state.update)
