"""Final results of a run: test score, sample translations, pictures, and a memory ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from pydantic import Field

from econmt.budget.planner import MemoryPlan
from econmt.checkpoint.checkpoints import load_model, load_saved, load_task
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.state import TrainingState, Update
from econmt.checkpoint.tensor_files import write_text
from econmt.config.json_reader import Record, read_json
from econmt.config.recipe import Recipe
from econmt.data.batching.batch import AnyBatch
from econmt.data.files import notice
from econmt.data.progress_bars import Say
from econmt.decoding.attention_picture import draw_attention, missing_note
from econmt.decoding.requests import Request
from econmt.decoding.text_reader import perplexity_of
from econmt.decoding.translation import Translation
from econmt.decoding.translator import Translator
from econmt.engine.measurement import measure_step
from econmt.engine.step import TrainingStep
from econmt.errors import InputError
from econmt.evaluation.metrics import bleu, recipe_tokenizer
from econmt.model import Implementations, IncrementalModel
from econmt.parallel.pipeline.partition import PipelinePlan
from econmt.parallel.simulated_rank import Rank, simulated_step
from econmt.tasks.protocol import Shape, Split
from econmt.tasks.registry import make_task
from econmt.training.choice import saved_choice
from econmt.training.context import RunContext
from econmt.training.validation import counted_sentences, make_translator, perplexity, requests_of
from econmt_memory.measure.ledger import Ledger
from econmt_ops.dispatch.rule import rules_only

SAMPLES = 3
READABLE_TOKENS = range(4, 25)
"""Number of source tokens of a sentence that is suitable for an attention picture."""


class Sample(NamedTuple):
    """A source sentence, its translation and its reference."""

    source: str
    translation: str
    reference: str


class RunResults(NamedTuple):
    """Results of the best checkpoint.

    Attributes:
        corpus: "test" if the recipe has a test text, otherwise "validation".
        bleu, signature: BLEU and its signature; NaN and empty without translations.
        samples: Some sentences with their translations.
        pictures: Files of the pictures.
        perplexities: Perplexities of a language model by "valid" and "test".
    """

    best_update: int
    corpus: Literal["test", "validation"]
    ledger: Ledger
    bleu: float = math.nan
    signature: str = ""
    samples: Sequence[Sample] = ()
    pictures: Sequence[Path] = ()
    perplexities: Mapping[str, float] = MappingProxyType({})


class ResultsFile(Record):
    """Content of results.json: the run's last update, and the results of its best checkpoint."""

    update: Update
    best_update: Update
    test: str | None
    corpus: Literal["test", "validation"]
    bleu: float | None  # None without translations, since JSON has no NaN
    signature: str
    pictures: list[str]
    perplexities: dict[str, float] = Field(default_factory=dict)


def read_results(folder: ModelFolder) -> ResultsFile | None:
    """Reads the results of a run; None if there are none yet.

    Raises:
        InputError: The file is broken.
    """
    try:
        return read_json(ResultsFile, folder.results, "run econmt train again to recreate it")
    except FileNotFoundError:
        return None


def are_complete(folder: ModelFolder, recipe: Recipe, update: int) -> bool:
    """Returns True if the results of a run that ended at ``update`` exist; warns if their file is broken."""
    try:
        results = read_results(folder)
    except InputError as error:
        notice(f"{str(error).partition('; ')[0]}; it will be recreated")
        return False
    return results is not None and results.update == update and results.test == recipe.data.test


def make_results(context: RunContext, say: Say = lambda _: None) -> RunResults:
    """Evaluates the best parameters, draws pictures, measures memory, and writes results.json at the end.

    Of several ranks, the memory of the first one is measured. ``say`` is called with the current activity.

    Raises:
        InputError: The folder holds no checkpoint, or an unreadable one.
        OSError: The disk is full.
    """
    recipe, folder = context.recipe, context.folder
    say("measuring the memory of a training step")
    state, plan, ledger = _measure(context)
    curve = folder.pictures / "learning_curve.png"
    draw_learning_curve(
        state.metrics, state.best_update, curve, f"learning curve of {folder.path.resolve().name}"
    )
    corpus: Literal["test", "validation"] = "validation" if context.prepared.test is None else "test"
    results = RunResults(state.best_update, corpus, ledger, pictures=[curve])
    translates = make_task(recipe, context.prepared).translates
    evaluate = _evaluate_translation if translates else _evaluate_language_model
    results = evaluate(context, plan, state, results, say)
    record = ResultsFile(
        update=state.update,
        best_update=state.best_update,
        test=recipe.data.test,
        corpus=results.corpus,
        bleu=None if math.isnan(results.bleu) else results.bleu,
        signature=results.signature,
        pictures=[str(path.relative_to(folder.path)) for path in results.pictures],
        perplexities=dict(results.perplexities),
    )
    write_text(folder.results, json.dumps(record.model_dump(), indent=1, allow_nan=False) + "\n")
    return results


def _evaluate_language_model(
    context: RunContext, plan: MemoryPlan | None, state: TrainingState, results: RunResults, say: Say
) -> RunResults:
    """Adds the perplexities of the validation and the test text."""
    recipe, prepared, device = context.recipe, context.prepared, context.device
    model = load_task(context.folder.path, "best", device).model
    step = TrainingStep(make_task(recipe, prepared), model, context.precision)
    splits: list[Split] = ["valid"] if prepared.test is None else ["valid", "test"]
    of_recipe = Implementations.of(recipe.ops)
    chosen = saved_choice(recipe, state.choices, device) or of_recipe
    # Without a backward pass, the default is fastest on a GPU, and slices of the vocabulary on a CPU.
    sliced = device.type == "cpu" and of_recipe.output == "auto"
    used = chosen._replace(output="recompute" if sliced else of_recipe.output)
    perplexities: dict[str, float] = {}
    with rules_only():  # as in training
        for split in splits:
            evaluation = step.task.evaluation(prepared, split, exact=True)
            batches = _with_status(evaluation.batches, f"reading the {split} text", say)
            perplexities[split] = perplexity(
                step, evaluation._replace(batches=batches), plan=plan, implementations=used
            )
    return results._replace(perplexities=perplexities)


def _with_status(batches: Iterable[AnyBatch], action: str, say: Say) -> Iterator[AnyBatch]:
    """Yields the batches and reports the number of tokens so far."""
    tokens = 0
    for batch in batches:
        say(f"{action}: {tokens:,} tokens")
        tokens += batch.target_tokens
        yield batch


def _evaluate_translation(
    context: RunContext, plan: MemoryPlan | None, state: TrainingState, results: RunResults, say: Say
) -> RunResults:
    """Adds BLEU, samples and an attention picture: translates the test text, or 100 validation sentences."""
    recipe, folder, prepared, device = context.recipe, context.folder, context.prepared, context.device
    loaded = load_model(folder.path, "best", device)
    searched = IncrementalModel(loaded.model)
    translator = make_translator(searched, loaded.vocabularies, recipe, device, plan)
    text, shown = (prepared.valid_text, 100) if prepared.test is None else (prepared.test_text, None)
    sources, references = text.source[:shown], text.target[:shown]
    requests = requests_of(sources, text.factors)
    done = counted_sentences(f"scoring the {results.corpus} text", len(requests), say)
    translations = list(translator.translate(requests, done=done))
    hypotheses = [translation.text for translation in translations]
    if prepared.test is not None:
        write_text(folder.test_hypotheses, "".join(line + "\n" for line in hypotheses))
        score = bleu(hypotheses, references, recipe_tokenizer(recipe, state.signature).name)
        results = results._replace(bleu=score.value, signature=score.signature)
    else:
        row = next(row for row in state.metrics if row["update"] == state.best_update)
        results = results._replace(bleu=row["bleu"], signature=state.signature)
    samples = [Sample(*three) for three in zip(sources, hypotheses, references, strict=True)]
    pictures = [*results.pictures, *_draw_attention(folder, translations, requests, translator)]
    return results._replace(samples=samples[:SAMPLES], pictures=pictures)


def _draw_attention(
    folder: ModelFolder, translations: list[Translation], requests: list[Request], translator: Translator
) -> list[Path]:
    """Draws the attention of a suitable sentence; returns the picture's path, if a translation has tokens."""
    lengths = {index: len(t.source_tokens) for index, t in enumerate(translations) if t.tokens}
    if not lengths:
        return []
    # The longest readable sentence shows most reordering; if none is readable, the shortest is the clearest.
    readable = [index for index, length in lengths.items() if length in READABLE_TOKENS]
    chosen = max(readable, key=lengths.__getitem__) if readable else min(lengths, key=lengths.__getitem__)
    attending = Translator(
        translator.models,
        translator.vocabularies,
        translator.options.changed(attention=True),
        translator.device,
        data=translator.data,
    )
    (translation,) = attending.translate([requests[chosen]])
    assert translation.attention is not None
    picture = folder.pictures / "attention.png"
    missing_glyphs = draw_attention(
        translation.attention, translation.source_tokens, translation.tokens, picture
    )
    if missing_glyphs:
        notice(f"warning: {missing_note(missing_glyphs, picture)}")
    return [picture]


def _measure(context: RunContext) -> tuple[TrainingState, MemoryPlan | None, Ledger]:
    """Measures the first rank's training step on the largest batch, or the plan's largest micro-batch.

    Returns:
        The run's last state, its memory plan, and the ledger.
    """
    folder, device = context.folder, context.device
    saved = load_saved(folder, folder.commits()[-1])
    recipe = context.recipe
    rank = Rank(0, context.communicator.size)
    training = recipe.training
    task = make_task(recipe, context.prepared)
    plan = MemoryPlan.from_state_dict(saved.state.plan) if saved.state.plan else None
    batches = task.batches(context.prepared)
    batch, accumulating = batches.worst_batch(), False
    if rank.size > 1:
        batch = batch.share(0, rank.size // recipe.parallel.pipeline)
    division = saved.state.pipeline
    step = simulated_step(
        task,
        load_task(folder.path, "best", device).model.train(),
        rank,
        Shape(len(batch.indices), *batch.positions),
        context.precision,
        plan=PipelinePlan(division["homes"], division["chunks"], "") if division else None,
    )
    if saved.optimizer_name == training.optimizer.name:
        step.load_optimizer_tensors(saved.optimizer, str(folder.path))
    if plan is not None:
        worst, step.overlaps = plan.worst, False
        batch = batches.largest_batch(worst.source, worst.target).first(worst.rows)
        step.implementations = worst.implementations
        accumulating = training.update_interval > 1 or worst.parts > 1
    elif (chosen := saved_choice(recipe, saved.state.choices, device)) is not None:
        step.implementations = chosen
    ledger = measure_step(step, batch, accumulating=accumulating, timed=False)
    ledger.rank = rank.text
    return saved.state, plan, ledger


WHY_BELOW = (
    "Training perplexity is that of the updates since the previous checkpoint, with dropout and label smoothing;\n"
    "validation perplexity is measured at the checkpoint without them, so its curve may lie below."
)


def draw_learning_curve(
    metrics: Sequence[Mapping[str, float]], best_update: int, path: Path, title: str = "learning curve"
) -> None:
    """Draws perplexity of training and validation text, and BLEU if it was measured, over the updates.

    Args:
        metrics: Rows of metrics.tsv, at least one.
        best_update: Update of the best checkpoint, marked by a vertical line.
        path: File to write; its suffix determines the format.
    """
    # The canvas replaces pyplot: it has no global state and needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    updates = [row["update"] for row in metrics]
    scores = [row["bleu"] for row in metrics]
    with_bleu = not all(math.isnan(score) for score in scores)
    figure = Figure(figsize=(10.0 if with_bleu else 7.0, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if with_bleu else 1, squeeze=False)[0]
    axes[0].plot(updates, [perplexity_of(-row["train_loss"]) for row in metrics], ".-", label="training")
    axes[0].plot(updates, [row["valid_perplexity"] for row in metrics], ".-", label="validation")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("perplexity")
    # Plain numbers rather than powers of ten; more of them if the range is small.
    axes[0].yaxis.set_major_locator(LogLocator(subs=_digits(metrics), numticks=12))
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    if with_bleu:
        axes[1].plot(updates, scores, ".-", color="tab:green", label="validation")
        axes[1].set_ylabel("BLEU")
    for axis in axes:
        axis.axvline(best_update, color="grey", linestyle=":", label="best checkpoint")
        axis.set_xlabel("updates")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title)
    figure.supxlabel(WHY_BELOW, fontsize=8, color="0.35")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


def _digits(metrics: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Returns the leading digits of the perplexity axis's ticks."""
    shown = [
        value for row in metrics for value in (perplexity_of(-row["train_loss"]), row["valid_perplexity"])
    ]
    finite = [value for value in shown if math.isfinite(value) and value > 0.0] or [1.0]
    span = max(finite) / min(finite)
    if span < 3.0:
        return tuple(1.0 + tenth / 10.0 for tenth in range(90))
    if span < 30.0:
        return (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    return (1.0, 2.0, 5.0) if span < 1000.0 else (1.0,)
