"""Options of translation by search or sampling, in addition to those of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from econmt.config import limits, recipe
from econmt.config.conditions import conflicts

LM_WEIGHT = 0.2
"""Default weight of a language model in a search."""

CHUNK_SIZE = 1024
"""Default number of lines that are read and sorted by length before any is translated."""


class SearchOptions(recipe.Decoding):
    """Options of a search: the keys of a recipe's ``decoding`` section, and those that only a call sets.

    Raises:
        ValidationError: pydantic's, a ValueError, if a value has another type or is out of range.
    """

    nbest_size: limits.NBestSize = Field(
        1,
        description="number of translations of a line, at most beam_size in beam search; more than 1 are printed as in "
        "Moses: number ||| text ||| log-probability ||| score",
    )
    ensemble_mode: Literal["linear", "log_linear"] = Field(
        "linear", description="average the probabilities of an ensemble, or their logarithms"
    )
    sample: limits.TopTokens | None = Field(
        None,
        description="null: beam search; 0: draw from the whole distribution; k: from its k most probable tokens",
    )
    top_p: limits.TopShare = Field(
        1.0,
        description="draw from the fewest most probable tokens whose probabilities add up to this (Holtzman et al., "
        "2020); 1: all tokens",
    )
    temperature: limits.Temperature = Field(
        1.0, description="divisor of the log-probabilities before drawing"
    )
    seed: limits.Seed = Field(
        1, description="seed of the random draws; those of a line depend on it and on the line's number only"
    )
    attention: bool = Field(True, description="hypotheses carry their attention")
    replace_unk: bool = Field(
        False, description="replace <unk> by the source word with the highest attention"
    )
    restore_case: bool = Field(
        False,
        description="translate lines in capitals in lower case, and convert the translation back to capitals",
    )
    markup: bool = Field(
        False,
        description="remove tags and placeholders before translating, and insert them into the translation by its "
        "alignment",
    )
    split_sentences: bool = Field(
        False,
        description="split lines into sentences, which are translated one by one; URLs and e-mail addresses are put "
        "back by the attention",
    )
    lm_weight: limits.PenaltyWeight = Field(
        0.0, description="factor of a language model's log-probabilities in scores; 0 leaves it out"
    )
    avoid: tuple[str, ...] = Field((), description="phrases that no translation may contain")
    glossary_mode: Literal["auto", "annotate", "constrain"] = Field(
        "auto",
        description="how sentences whose translations lack a term are translated again. annotate: terms are written "
        "into the source with their translations, for a model trained with data.annotate_terms; constrain: "
        "translations are constraints of the search; auto: annotate if the model knows that, and constrain the search "
        "if a term still lacks",
    )
    chunk_size: Annotated[int, Field(ge=1, le=limits.LINES)] = Field(
        CHUNK_SIZE,
        description="number of lines that are read and sorted by length before they are translated",
    )
    long_lines: Literal["cut", "skip"] = Field(
        "cut",
        description="treatment of lines of more than max_input_length tokens: translate the beginning, or write an "
        "empty line",
    )
    continuous: bool | None = Field(
        None,
        description="beam search with one model replaces finished sentences by waiting ones, on a GPU in CUDA graphs; "
        "null: on a GPU only. Results are the same",
    )

    @model_validator(mode="after")
    def _options_fit(self) -> SearchOptions:
        if self.sample is None and self.nbest_size > self.beam_size:
            raise ValueError(f"nbest_size {self.nbest_size} must not exceed beam_size {self.beam_size}")
        named = {f"decoding.{name}": value for name, value in self}
        for problem in conflicts(named):
            raise ValueError(problem.replace("decoding.", ""))
        return self

    @classmethod
    def from_recipe(cls, decoding: recipe.Decoding) -> SearchOptions:
        """Returns the options of a recipe's ``decoding`` section."""
        return cls(**decoding.model_dump())

    def changed(self, **changes: Any) -> SearchOptions:
        """Returns these options with some values replaced, after all checks."""
        return SearchOptions(**{**dict(self), **changes})

    @property
    def penalizes(self) -> bool:
        """True if scores include more than log-probabilities divided by the length penalty."""
        return max(self.brevity_penalty_weight, self.coverage_penalty_weight, self.word_penalty) > 0.0

    @property
    def adjusts(self) -> bool:
        """True if the log-probabilities of next tokens are changed (:mod:`econmt.decoding.search.adjustments`)."""
        return bool(
            self.min_output_length
            or self.ban_unk
            or self.unk_penalty
            or self.repetition_penalty > 1.0
            or self.lm_weight
        )

    @property
    def is_plain(self) -> bool:
        """True if a search uses only log-probabilities and lengths, and ends when no better hypothesis can come."""
        ends_early = self.beam_search_stop == "first" or self.beam_prune
        changed = self.penalizes or self.adjusts or self.block_ngram_repeat
        return not (changed or ends_early)
