"""``econmt rerank``: n-best lists in another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from econmt.checkpoint.hub import local_model
from econmt.cli import options
from econmt.cli.computing import counting_lines, load_models
from econmt.cli.options import ProductPrecision, within
from econmt.cli.text_models import holds_language_model
from econmt.config import limits
from econmt.data.files import notice
from econmt.data.text.corpus import read_lines
from econmt.decoding.streams import STANDARD_INPUT, LineOutput, read_chunks, standard_input
from econmt.errors import InputError
from econmt.evaluation.metrics import tokenizer_of
from econmt.evaluation.reranking import (
    Judge,
    WeightedScorer,
    by_models,
    by_reference,
    read_lists,
)
from econmt.evaluation.reranking import (
    rerank as reranked,
)
from econmt.evaluation.scoring import Scorer

LISTS_AT_ONCE = 64
"""Sentences whose lists are scored together."""


class SentenceMetric(str, Enum):
    """Metric that compares a translation with its reference."""

    bleu = "bleu"
    chrf = "chrf"


WeightOption = Annotated[
    float,
    typer.Option(
        callback=within(0.0, limits.PENALTY),
        help="What the mean log-probability of a token by --models counts, beside the score in the list.",
    ),
]
ReverseWeightOption = Annotated[
    float, typer.Option(callback=within(0.0, limits.PENALTY), help="The same of --reverse-models.")
]


def rerank(
    context: typer.Context,
    hypotheses: Annotated[
        Path | None,
        typer.Option(
            "--hypotheses",
            "-i",
            help="N-best lists, as translate --nbest-size writes them.",
            show_default="standard input",
        ),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option("--reference", "-r", help="Order by how near a reference they are.")
    ] = None,
    metric: Annotated[SentenceMetric, typer.Option(help="Of --reference.")] = SentenceMetric.bleu,
    source: Annotated[
        Path | None, typer.Option("--source", "-s", help="The text that was translated, for models.")
    ] = None,
    models: Annotated[
        list[Path] | None,
        typer.Option("--models", "--model", "-m", help="Model folders that score source to translation."),
    ] = None,
    weight: WeightOption = 1.0,
    reverse_models: Annotated[
        list[Path] | None,
        typer.Option(
            "--reverse-models", "--reverse-model", help="Model folders that score translation to source."
        ),
    ] = None,
    reverse_weight: ReverseWeightOption = 1.0,
    whole_lists: Annotated[
        bool, typer.Option("--nbest", help="Print whole lists with their new scores, not the best alone.")
    ] = False,
    output: options.OutputOption = None,
    batch_size: options.BatchSizeOption = None,
    device: options.DeviceOption = "auto",
    threads: options.ThreadsOption = None,
    precision: options.PrecisionOption = ProductPrecision.auto,
) -> None:
    """Put n-best lists into another order: by a reference, or by the scores of other models.

    With a reference this tells how good the lists are at best. Models may have other vocabularies than the one that
    made the lists; several of --models are an ensemble.

    \b
    Example:
      econmt translate -m runs/en-de -i test.en --nbest-size 5 -o lists
      econmt rerank -i lists -s test.en --reverse-model runs/de-en > test.de
      econmt rerank -i lists -r test.de --metric chrf -o best.de
    """
    _check_options(context, locals())
    options.check_writable(output)
    for folders in (models, reverse_models):
        options.check_not_of_model(output, folders or ())
    given = reference if reference is not None else source
    assert given is not None
    lines_out = LineOutput(output, [hypotheses, given])
    where = STANDARD_INPUT if hypotheses is None else str(hypotheses)
    lines = (
        read_lines(hypotheses)
        if hypotheses is not None
        else chain.from_iterable(read_chunks(standard_input(), 1 << 12))
    )
    lists = list(read_lists(lines, where))
    texts = list(read_lines(given))
    if len(texts) != len(lists):
        raise InputError(f"{where} has lists of {len(lists)} sentences but {given} has {len(texts)} lines")
    judge: Judge
    if reference is not None:
        tokenizer, note = tokenizer_of(reference.name.removesuffix(".gz").rpartition(".")[2])
        if note and metric == SentenceMetric.bleu:
            notice(note)
        judge = by_reference(metric.value, texts, tokenizer)
    else:
        asked = ((models, weight, False), (reverse_models, reverse_weight, True))
        judge = by_models(
            texts,
            [
                WeightedScorer(_scorer(folders, device, precision, threads, batch_size), counts, reverse)
                for folders, counts, reverse in asked
                if folders
            ],
        )
    with counting_lines("reordering", given, "sentences", lines_out) as done, lines_out as write:
        for own in reranked(lists, judge, LISTS_AT_ONCE):
            write([each.line for each in own] if whole_lists else [own[0].text])
            done(1)


def _scorer(
    folders: Sequence[Path],
    device: str,
    precision: ProductPrecision,
    threads: int | None,
    batch_size: int | None,
) -> Scorer:
    folders = [local_model(folder) for folder in folders]
    if holds_language_model(folders):
        raise InputError(f"{folders[0]}: a language model scores no pairs; give a translation model")
    loaded = load_models(folders, None, device, precision, threads)
    if loaded.vocabularies.factors:
        raise InputError(f"{folders[0]}: reads source factors, which lists have none of; give another model")
    return Scorer(
        loaded.models,
        loaded.vocabularies,
        loaded.device,
        loaded.precision,
        batch_size=batch_size or loaded.recipe.decoding.batch_size,
    )


def _check_options(context: typer.Context, given: Mapping[str, Any]) -> None:
    """Refuse what does not fit together, and options that would change nothing."""
    asks = bool(given["models"] or given["reverse_models"])
    if (given["reference"] is not None) == asks:
        raise InputError("give --reference, or --models or --reverse-models, by which to order; one of both")
    if asks and given["source"] is None:
        raise InputError(
            "--models and --reverse-models score pairs; give the text that was translated as --source"
        )
    if not asks:
        why = "is of --models and --reverse-models; leave it out"
        options.refuse_idle(
            context, why, "source", "weight", "reverse_weight", "batch_size", "device", "threads", "precision"
        )
        return
    options.refuse_idle(context, "is of --reference; leave it out", "metric")
    for name in ("models", "reverse_models"):
        if not given[name]:
            why = f"is of --{name.replace('_', '-')}; leave it out"
            options.refuse_idle(context, why, "weight" if name == "models" else "reverse_weight")
