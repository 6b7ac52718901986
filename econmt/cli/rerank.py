"""``econmt rerank``: sorts n-best lists by references or by the scores of other models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from econmt.api.commands import load_models
from econmt.checkpoint.hub import local_model
from econmt.cli.computing import counting_lines, holds_language_model, line_chunks, line_output
from econmt.config import limits
from econmt.data.files import notice
from econmt.data.text.corpus import read_lines
from econmt.decoding.streams import STANDARD_INPUT
from econmt.errors import InputError
from econmt.evaluation.metrics import tokenizer_of
from econmt.evaluation.reranking import Judge, WeightedScorer, by_models, by_reference, read_lists
from econmt.evaluation.reranking import rerank as reranked
from econmt.evaluation.scoring import Scorer
from econmt.options.option_groups import option, recipe_option
from econmt.options.shared_options import FloatComputing, OutputOption

LISTS_AT_ONCE = 64
"""Sentences whose lists are scored together."""


@dataclass(frozen=True)
class ScoringModels:
    """Models that score pairs of source and translation, in one direction or both."""

    models: list[Path] | None = option(
        None, "--models", "--model", "-m", help="Model folders that score the translation given the source."
    )
    weight: limits.PenaltyWeight = option(
        1.0,
        help="Weight of the mean log-probability per token by --models; the score in the list has weight 1.",
    )
    reverse_models: list[Path] | None = option(
        None,
        "--reverse-models",
        "--reverse-model",
        help="Model folders that score the source given the translation.",
    )
    reverse_weight: limits.PenaltyWeight = option(
        1.0, help="Weight of the mean log-probability per token by --reverse-models."
    )
    batch_size: int | None = recipe_option("decoding.batch_size")

    @property
    def folders(self) -> list[Path]:
        """All model folders."""
        return [*(self.models or ()), *(self.reverse_models or ())]


def rerank(
    *,
    hypotheses: Path | None = option(
        None,
        "--hypotheses",
        "-i",
        help="N-best lists as written by translate --nbest-size.",
        show_default="standard input",
    ),
    reference: Path | None = option(
        None, "--reference", "-r", help="Reference translations; order by similarity to them."
    ),
    metric: Literal["bleu", "chrf"] = option("bleu", help="With --reference: metric of the similarity."),
    source: Path | None = option(
        None, "--source", "-s", help="With --models or --reverse-models: the text that was translated."
    ),
    scoring: ScoringModels,
    whole_lists: bool = option(
        False, "--nbest", help="Print the whole lists with their new scores, not only the best translations."
    ),
    output: OutputOption = None,
    computing: FloatComputing,
) -> None:
    """Sort n-best lists by similarity to references, or by the scores of other models.

    References show the best quality that the lists contain. The vocabularies of the models may differ from that of the
    model that made the lists; several --models form an ensemble.

    \b
    Example:
      econmt translate -m runs/en-de -i test.en --nbest-size 5 -o lists
      econmt rerank -i lists -s test.en --reverse-model runs/de-en > test.de
      econmt rerank -i lists -r test.de --metric chrf -o best.de
    """
    if (reference is None) == (not scoring.folders):
        raise InputError("give either --reference, or --models or --reverse-models, to sort by")
    if scoring.folders and source is None:
        raise InputError(
            "--models and --reverse-models score sentence pairs; give the text that was translated as --source"
        )
    text_file = reference if reference is not None else source
    assert text_file is not None
    lines_out = line_output(output, [hypotheses, text_file], scoring.folders)
    where = STANDARD_INPUT if hypotheses is None else str(hypotheses)
    lists = list(read_lists(chain.from_iterable(line_chunks(hypotheses, 1 << 12)), where))
    texts = list(read_lines(text_file))
    if len(texts) != len(lists):
        raise InputError(
            f"{where} has lists of {len(lists)} sentences but {text_file} has {len(texts)} lines"
        )
    judge: Judge
    if reference is not None:
        tokenizer, note = tokenizer_of(reference.name.removesuffix(".gz").rpartition(".")[2])
        if note and metric == "bleu":
            notice(note)
        judge = by_reference(metric, texts, tokenizer)
    else:
        forward = scoring.models, scoring.weight, False
        backward = scoring.reverse_models, scoring.reverse_weight, True
        scorers = [
            WeightedScorer(_scorer(folders, computing, scoring.batch_size), weight, reverse)
            for folders, weight, reverse in (forward, backward)
            if folders
        ]
        judge = by_models(texts, scorers)
    with counting_lines("reordering", text_file, "sentences", lines_out) as done, lines_out as write:
        for candidates in reranked(lists, judge, LISTS_AT_ONCE):
            write([each.line for each in candidates] if whole_lists else [candidates[0].text])
            done(1)


def _scorer(folders: Sequence[Path], computing: FloatComputing, batch_size: int | None) -> Scorer:
    folders = [local_model(folder) for folder in folders]
    if holds_language_model(folders):
        raise InputError(
            f"{folders[0]}: a language model cannot score sentence pairs; give a translation model"
        )
    loaded = load_models(folders, computing)
    if loaded.vocabularies.factors:
        raise InputError(
            f"{folders[0]}: needs source factors, which n-best lists do not have; give another model"
        )
    return loaded.scorer(batch_size)
