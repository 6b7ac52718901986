"""``econmt score``: how probable given translations are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from econmt.checkpoint.hub import local_model
from econmt.cli import options
from econmt.cli.computing import counting_lines, load_models
from econmt.cli.factors import FactorFiles, SourceFactorsOption
from econmt.cli.options import AveragingMode, ProductPrecision
from econmt.cli.text_models import holds_language_model, load_reader, score_text
from econmt.config.json_reader import json_text
from econmt.data.files import notice
from econmt.data.text.corpus import Corpus, read_pairs, split_pair
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import SearchOptions, length_penalty
from econmt.decoding.streams import STANDARD_INPUT, LineOutput, read_chunks, standard_input
from econmt.decoding.translator import CHUNK_SIZE
from econmt.errors import InputError
from econmt.evaluation.scoring import ScoredPair, Scorer, token_ids


class ScoreType(str, Enum):
    """Output for each pair."""

    logprob = "logprob"
    neglogprob = "neglogprob"
    normalized = "normalized"
    perplexity = "perplexity"
    json = "json"


def score(
    context: typer.Context,
    models: options.ModelsOption,
    source: Annotated[
        Path | None,
        typer.Option("--source", "-s", help="Source text, also .gz."),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--target", "-t", help="Its translation, line by line."),
    ] = None,
    source_factors: SourceFactorsOption = None,
    output: options.OutputOption = None,
    score_type: Annotated[
        ScoreType,
        typer.Option(
            help="Of the whole target, end of sentence counted; normalized is what translate calls the score."
        ),
    ] = ScoreType.logprob,
    target_tokens: Annotated[
        bool,
        typer.Option(
            "--target-tokens",
            help="The target is vocabulary tokens between spaces, as in translate's json, not raw text.",
        ),
    ] = False,
    total: Annotated[
        bool, typer.Option("--total", help="Of a language model: one result for the whole text.")
    ] = False,
    length_penalty_alpha: options.AlphaOption = None,
    length_penalty_beta: options.BetaOption = None,
    batch_size: options.BatchSizeOption = None,
    max_input_length: options.InputLengthOption = None,
    checkpoint: options.CheckpointsOption = None,
    ensemble_mode: options.EnsembleOption = AveragingMode.linear,
    device: options.DeviceOption = "auto",
    threads: options.ThreadsOption = None,
    precision: options.PrecisionOption = ProductPrecision.auto,
) -> None:
    """Print the log-probability (natural logarithm) that a model gives to each translation or line of text.

    Pairs come from --source and --target, or from standard input with a tab between source and target. The text of
    a translation is cut into tokens anew, not always as the search did that made it; --target-tokens scores the
    tokens that translate --output-type json prints.

    A language model scores the lines of --target or standard input, each given all before it, and perplexity is per
    word.

    \b
    Example:
      econmt score -m runs/wikitext2 -t test.txt --score-type perplexity --total
      econmt score -m runs/multi30k -s test.en -t test.de
      paste dev.en dev.de | econmt score -m runs/multi30k --score-type perplexity
    """
    options.check_writable(output)
    options.check_not_of_model(output, models)
    if holds_language_model(models := [local_model(model) for model in models]):
        unfit = {
            "--source": source,
            "--source-factors": source_factors,
            "--target-tokens": target_tokens or None,
            "--score-type normalized": score_type == ScoreType.normalized or None,
            "--length-penalty-alpha": length_penalty_alpha,
            "--length-penalty-beta": length_penalty_beta,
            "--batch-size": batch_size,
            "--max-input-length": max_input_length,
        }
        for option in (name for name, given in unfit.items() if given is not None):
            raise InputError(f"{option}: means nothing with a language model; leave it out")
        reader = load_reader(models[0], (checkpoint or ["best"])[0], device, precision, threads)
        score_text(reader, target, LineOutput(output, [target]), score_type.value, total=total)
        return
    _check_options(context, locals(), score_type)
    lines_out = LineOutput(output, [source, target, *(source_factors or ())])
    loaded = load_models(models, checkpoint, device, precision.value, threads)
    given = {"length_penalty_alpha": length_penalty_alpha, "length_penalty_beta": length_penalty_beta}
    search = loaded.search_options(given)
    scorer = Scorer(
        loaded.models,
        loaded.vocabularies,
        loaded.device,
        loaded.precision,
        batch_size=batch_size or loaded.recipe.decoding.batch_size,
        mode=ensemble_mode.value,
        warn=lambda text: notice(f"warning: {text}"),
    )
    most = max_input_length or loaded.recipe.decoding.max_input_length
    places = tuple(STANDARD_INPUT if path is None else str(path) for path in (source, target))
    show = _formatter(score_type, search)
    factors = FactorFiles(source_factors, loaded.recipe.pairs.source_factors, option="--source-factors")
    with counting_lines("scoring", target, "pairs", lines_out) as done, lines_out as write:
        for chunk in _score(scorer, _pairs(source, target), places, most, target_tokens, factors, done):
            write(map(show, chunk))


def _score(
    scorer: Scorer,
    chunks: Iterator[list[tuple[str, str]]],
    places: Sequence[str],
    most: int,
    target_tokens: bool,
    factors: FactorFiles,
    done: Callable[[int], None],
) -> Iterator[list[ScoredPair]]:
    """Scores chunks of pairs.

    Args:
        scorer: of the models.
        chunks: of the text.
        places: what its source and its target side are called.
        most: tokens that a side may have.
        target_tokens: the targets are tokens, not text.
        factors: of the sources.
        done: told how many more are scored.

    Raises:
        InputError: a side is too long, a token is none, or source factors are not those of the source.
    """
    from_source, where = places
    source_side, target_side = scorer.vocabularies.sides
    encode = token_ids(target_side) if target_tokens else target_side.encode
    lines = 0
    for chunk in chunks:
        targets = []
        for number, (text_of_source, text) in enumerate(chunk, lines + 1):
            try:
                targets.append(encode(text))
            except KeyError as error:
                raise InputError(
                    f"{where}:{number}: '{error.args[0]}' is not a token of the target vocabulary; --target-tokens "
                    "takes the tokens that translate --output-type json prints"
                ) from None
            longest = max(len(source_side.encode(text_of_source)), len(targets[-1]))
            if longest > most:
                raise InputError(
                    f"{where}:{number}: {longest:,} tokens on a side, more than a pair of {most:,} may have; "
                    "leave the pair out, or raise --max-input-length"
                )
        requests = factors.given_to([Request(text) for text, _ in chunk], from_source)
        own = [each.factors for each in requests]
        place = partial(_place, [from_source, *factors.names], lines + 1)
        yield scorer.score_ids([each.text for each in requests], targets, done, factors=own, place=place)
        lines += len(chunk)
    factors.finish(from_source)


def _place(names: Sequence[str], first: int, number: int, stream: int | None) -> str:
    """Returns the name of a source line, or of a line of its factors, for messages."""
    return f"{names[0 if stream is None else stream + 1]}:{first + number}"


def _check_options(context: typer.Context, given: Mapping[str, Any], score_type: ScoreType) -> None:
    """Refuse options that would change nothing, and one side without the other."""
    if given["total"]:
        raise InputError("--total: is for language models; leave it out")
    if (given["source"] is None) != (given["target"] is None):
        raise InputError(
            "give both --source and --target, or neither and tab-separated pairs on standard input"
        )
    if score_type not in (ScoreType.normalized, ScoreType.json):
        why = f"does not change --score-type {score_type.value}; it is of normalized and json"
        options.refuse_idle(context, why, "length_penalty_alpha", "length_penalty_beta")


def _pairs(source: Path | None, target: Path | None) -> Iterator[list[tuple[str, str]]]:
    """Chunks of sentence pairs from two files, or from standard input, which may pause."""
    if source is not None:
        pairs = read_pairs(Corpus(source, target))
        while chunk := list(islice(pairs, CHUNK_SIZE)):
            yield chunk
        return
    first = 1
    for lines in read_chunks(standard_input(), CHUNK_SIZE):
        yield [split_pair(line, STANDARD_INPUT, number) for number, line in enumerate(lines, first)]
        first += len(lines)


def _formatter(score_type: ScoreType, options: SearchOptions) -> Callable[[ScoredPair], str]:
    def normalized(pair: ScoredPair) -> float:
        return pair.log_probability / float(length_penalty(pair.length, options))

    def as_json(pair: ScoredPair) -> str:
        # JSON has no infinity: null stands for the log-probability of what cannot be.
        possible = math.isfinite(pair.log_probability)
        figures = (pair.log_probability, normalized(pair), pair.perplexity) if possible else (None,) * 3
        record: dict[str, Any] = dict(zip(("log_probability", "score", "perplexity"), figures, strict=True))
        record |= {"tokens": pair.tokens, "token_log_probabilities": pair.token_log_probabilities}
        return json_text(record)

    figures: dict[ScoreType, Callable[[ScoredPair], float]] = {
        ScoreType.logprob: lambda pair: pair.log_probability,
        ScoreType.neglogprob: lambda pair: -pair.log_probability,
        ScoreType.normalized: normalized,
        ScoreType.perplexity: lambda pair: pair.perplexity,
    }
    if score_type == ScoreType.json:
        return as_json
    figure = figures[score_type]
    return lambda pair: f"{figure(pair):.6f}"
