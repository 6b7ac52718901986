"""Shared by commands that use language models: loading one, and scoring text with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from econmt.api.commands import load_any
from econmt.api.language_model import TrainedLanguageModel
from econmt.checkpoint.folder import ModelFolder
from econmt.cli.computing import counting_lines, line_chunks
from econmt.config.json_reader import json_text
from econmt.data.files import notice
from econmt.decoding.streams import LineOutput
from econmt.decoding.text_reader import ScoredLine, TextReader
from econmt.errors import InputError
from econmt.export.model_folder import recipe_of
from econmt.options.shared_options import FloatComputing

CHUNK = 1000
"""Number of lines read at a time."""
ScoreType = Literal["logprob", "neglogprob", "normalized", "perplexity", "json"]
"""Output for each line or pair; a language model has no normalized score."""


def holds_language_model(models: Sequence[Path]) -> bool:
    """Returns True if the model is a language model; raises InputError if it is one of several models."""
    tasks = [recipe_of(ModelFolder(folder)).task for folder in models]
    if "language_model" not in tasks:
        return False
    if len(models) > 1:
        raise InputError(f"{models[1]}: language models cannot form an ensemble; give one model")
    return True


def load_reader(folder: Path, checkpoint: str, computing: FloatComputing) -> TextReader:
    """Loads the language model in a folder, as a reader at the beginning of a text."""
    loaded = load_any([folder], computing, [checkpoint])
    if not isinstance(loaded, TrainedLanguageModel):
        raise InputError(f"{folder}: holds a translation model; this takes a language model")
    return loaded.reader()


def score_text(
    reader: TextReader, text: Path | None, output: LineOutput, score_type: ScoreType, *, total: bool
) -> None:
    """Writes the probability of each line of a text given all lines before it, and reports the total.

    ``text`` is None for standard input; ``total`` writes one result for the whole text instead.
    """
    words = tokens = 0
    nats: list[float] = []
    with counting_lines("scoring", text, "lines", output, at_end=total) as done, output as write:
        for chunk in line_chunks(text, CHUNK):
            scored = []
            for line in reader.score(chunk):
                scored.append(line)
                done(1)
            words += sum(line.words for line in scored)
            tokens += sum(len(line.token_log_probabilities) for line in scored)
            nats += [-line.log_probability for line in scored]
            if not total:
                write(_shown(line, score_type) for line in scored)
        if not words:
            raise InputError("there is no line to score")
        mean = math.fsum(nats) / words
        perplexity = math.exp(mean) if mean < 700.0 else math.inf
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


def _shown(line: ScoredLine, score_type: ScoreType) -> str:
    if score_type == "json":
        record = {
            "log_probability": line.log_probability,
            "perplexity": line.perplexity if math.isfinite(line.perplexity) else None,
            "words": line.words,
            "tokens": line.tokens,
            "token_log_probabilities": line.token_log_probabilities,
        }
        return json_text(record)
    figures = {"logprob": line.log_probability, "neglogprob": -line.log_probability}
    return f"{figures.get(score_type, line.perplexity):.6f}"
