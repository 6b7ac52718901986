"""``econmt score``: prints the probability that models give to existing translations or text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from econmt.api.commands import load_models
from econmt.checkpoint.hub import local_model
from econmt.cli.computing import counting_lines, holds_language_model, line_chunks, line_output, load_reader
from econmt.cli.factors import FactorFiles, SourceFactorsOption
from econmt.config.json_reader import json_text
from econmt.data.files import notice
from econmt.data.text.corpus import Corpus, read_pairs, split_pair
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import length_penalty
from econmt.decoding.streams import STANDARD_INPUT, LineOutput, read_chunks, standard_input
from econmt.decoding.text_reader import ScoredLine, TextReader, perplexity_of
from econmt.decoding.translator import CHUNK_SIZE
from econmt.errors import InputError
from econmt.evaluation.scoring import ScoredPair, Scorer, token_ids
from econmt.options.option_groups import RecipeKeys, option, recipe_option
from econmt.options.option_rules import refuse_options
from econmt.options.shared_options import FloatComputing, ModelChoice, OutputOption

ScoreType = Literal["logprob", "neglogprob", "normalized", "perplexity", "json"]
"""Output for each line or pair; a language model has no normalized score."""


@dataclass(frozen=True)
class PairInput:
    """Sentence pairs to score, from two files or, without both, from standard input."""

    source: Path | None = option(None, "--source", "-s", help="Source text, also .gz.")
    target: Path | None = option(None, "--target", "-t", help="Translation of the source text, line by line.")
    source_factors: SourceFactorsOption = None
    target_tokens: bool = option(
        False, help="The target is tokens separated by spaces, as in the JSON of translate, not raw text."
    )

    @property
    def names(self) -> tuple[str, str]:
        """Names of the source and the target side in messages."""
        source, target = (str(path or STANDARD_INPUT) for path in (self.source, self.target))
        return source, target


def score(
    context: typer.Context,
    *,
    model: ModelChoice,
    pairs: PairInput,
    output: OutputOption = None,
    score_type: ScoreType = option(
        "logprob",
        help="Figure to print for each target, including its end; normalized is the score of translate.",
    ),
    total: bool = option(False, help="Language models only: print one result for the whole text."),
    penalty: Annotated[
        dict[str, Any], RecipeKeys("decoding", ["length_penalty_alpha", "length_penalty_beta"])
    ],
    batch_size: int | None = recipe_option("decoding.batch_size"),
    max_input_length: int | None = recipe_option(
        "decoding.max_input_length", help="Maximum number of tokens on a side of a pair; more are an error."
    ),
    computing: FloatComputing,
) -> None:
    """Print the log-probability (natural logarithm) that a model gives to each translation or line of text.

    Pairs are read from --source and --target, or from standard input with a tab between source and target. A target is
    split into tokens, which may differ from those of the search that made it; --target-tokens scores the tokens that
    translate --output-type json prints.

    A language model scores the lines of --target or standard input, each given all lines before it; perplexity is per
    word.

    \b
    Example:
      econmt score -m runs/wikitext2 -t test.txt --score-type perplexity --total
      econmt score -m runs/multi30k -s test.en -t test.de
      paste dev.en dev.de | econmt score -m runs/multi30k --score-type perplexity
    """
    models = [local_model(name) for name in model.models]
    read = [pairs.source, pairs.target, *(pairs.source_factors or ())]
    if holds_language_model(models):
        refuse_options(context, "score of a language model")
        if score_type == "normalized":
            raise InputError("--score-type normalized is for translation models; leave it out")
        lines_out = line_output(output, [pairs.target], models)
        checkpoint = (model.checkpoint or ["best"])[0]
        reader = load_reader(models[0], checkpoint, computing)
        _score_text(reader, pairs.target, lines_out, score_type, total=total)
        return
    refuse_options(context, "score of a translation model")
    if (pairs.source is None) != (pairs.target is None):
        raise InputError(
            "give both --source and --target, or neither and tab-separated pairs on standard input"
        )
    lines_out = line_output(output, read, models)
    loaded = load_models(models, computing, model.checkpoint)
    options = loaded.search_options(penalty)

    def show(pair: ScoredPair) -> str:
        score = pair.log_probability / float(length_penalty(pair.length, options))
        return _shown(pair, score_type, {"score": score})

    scorer = loaded.scorer(batch_size, model.ensemble_mode, lambda text: notice(f"warning: {text}"))
    most = max_input_length or loaded.recipe.decoding.max_input_length
    factors = FactorFiles(pairs.source_factors, loaded.recipe.pairs.source_factors, option="--source-factors")
    with counting_lines("scoring", pairs.target, "pairs", lines_out) as done, lines_out as write:
        for chunk in _score(scorer, pairs, most, factors, done):
            write(map(show, chunk))


def _score(
    scorer: Scorer, pairs: PairInput, most: int, factors: FactorFiles, done: Callable[[int], None]
) -> Iterator[list[ScoredPair]]:
    """Scores chunks of pairs with at most ``most`` tokens on a side; calls ``done`` with numbers of further pairs."""
    from_source, where = pairs.names
    vocabularies = scorer.vocabularies

    encode = token_ids(vocabularies.target) if pairs.target_tokens else vocabularies.target.encode
    lines = 0
    for chunk in _chunks(pairs):
        targets = []
        for number, (text_of_source, text) in enumerate(chunk, lines + 1):
            try:
                targets.append(encode(text))
            except KeyError as error:
                raise InputError(
                    f"{where}:{number}: '{error.args[0]}' is not a token of the target vocabulary; --target-tokens "
                    "takes the tokens that translate --output-type json prints"
                ) from None
            longest = max(len(vocabularies.source.encode(text_of_source)), len(targets[-1]))
            if longest > most:
                raise InputError(
                    f"{where}:{number}: {longest:,} tokens on a side, more than a pair of {most:,} may have; "
                    "leave the pair out, or raise --max-input-length"
                )
        requests = factors.add_to([Request(text) for text, _ in chunk], from_source)
        words = [each.factors for each in requests]
        name_of = partial(_line_name, [from_source, *factors.names], lines + 1)
        yield scorer.score_ids(
            [each.text for each in requests], targets, done, factors=words, name_of=name_of
        )
        lines += len(chunk)
    factors.finish(from_source)


def _line_name(names: Sequence[str], first: int, number: int, stream: int | None) -> str:
    """Returns the name of a source line, or of a line of its factors, for messages."""
    return f"{names[0 if stream is None else stream + 1]}:{first + number}"


def _chunks(pairs: PairInput) -> Iterator[list[tuple[str, str]]]:
    """Yields chunks of sentence pairs from two files, or from standard input, which may pause."""
    if pairs.source is not None:
        lines_of_both = read_pairs(Corpus(pairs.source, pairs.target))
        while chunk := list(islice(lines_of_both, CHUNK_SIZE)):
            yield chunk
        return
    first = 1
    for lines in read_chunks(standard_input(), CHUNK_SIZE):
        yield [split_pair(line, STANDARD_INPUT, number) for number, line in enumerate(lines, first)]
        first += len(lines)


def _score_text(
    reader: TextReader, text: Path | None, output: LineOutput, score_type: ScoreType, *, total: bool
) -> None:
    """Writes the probability of each line of a text given all lines before it, and reports the total.

    ``text`` is None for standard input; ``total`` writes one result for the whole text instead.
    """
    words = tokens = 0
    nats: list[float] = []
    with counting_lines("scoring", text, "lines", output, at_end=total) as done, output as write:
        for chunk in line_chunks(text, CHUNK_SIZE):
            scored = []
            for line in reader.score(chunk):
                scored.append(line)
                done(1)
            words += sum(line.words for line in scored)
            tokens += sum(len(line.token_log_probabilities) for line in scored)
            nats += [-line.log_probability for line in scored]
            if not total:
                write(_shown(line, score_type, {"words": line.words}) for line in scored)
        if not words:
            raise InputError("there is no line to score")
        mean = math.fsum(nats) / words
        perplexity = perplexity_of(-math.fsum(nats), words)
        if total and score_type == "json":
            figures = {"lines": len(nats), "words": words, "tokens": tokens, "nats": math.fsum(nats)}
            write([json_text({**figures, "perplexity": perplexity if math.isfinite(perplexity) else None})])
        elif total:
            figure = {"logprob": -math.fsum(nats), "neglogprob": math.fsum(nats)}.get(score_type, perplexity)
            write([f"{figure:.6f}"])
    notice(
        f"{len(nats):,} lines, {words:,} words with ends of lines: {math.fsum(nats):,.1f} nats, {mean:.4f} a word, "
        f"perplexity {perplexity:.2f}"
    )


def _shown(scored: ScoredPair | ScoredLine, score_type: ScoreType, more: Mapping[str, float]) -> str:
    """Formats the figures of a pair or line; ``more`` are those that only one of them has."""
    figures = {"log_probability": scored.log_probability, **more, "perplexity": scored.perplexity}
    if score_type == "json":
        # JSON has no infinity: null is the log-probability of an impossible translation.
        record: dict[str, Any] = {
            name: value if math.isfinite(value) else None for name, value in figures.items()
        }
        record |= {"tokens": scored.tokens, "token_log_probabilities": scored.token_log_probabilities}
        return json_text(record)
    if score_type == "neglogprob":
        return f"{-scored.log_probability:.6f}"
    names = {"logprob": "log_probability", "normalized": "score", "perplexity": "perplexity"}
    return f"{figures[names[score_type]]:.6f}"
