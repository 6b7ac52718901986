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

    Attributes:
        nbest_size: number of hypotheses returned per sentence, at most ``beam_size`` in beam search.
        ensemble_mode: average the models' probabilities (linear) or their log-probabilities (log_linear).
        sample: None for beam search; 0 draws from the whole distribution, k from its k most probable tokens.
        top_p: share of the probability from whose most probable tokens a token is drawn (Holtzman et al., 2020).
        temperature: divisor of log-probabilities before a token is drawn.
        seed: seed of the draws; the draws of a sentence depend on it and on the sentence's number only.
        attention: True if hypotheses carry their attention.
        replace_unk: True if an unknown token is replaced by the source text that it attends to most (needs attention).
        restore_case: True if a line in capitals is translated in lower case and its translation put in capitals.
        markup: True if tags and placeholders are removed before translation and inserted into it; needs
            ``attention``.
        split_sentences: True if lines are split into sentences, which are translated one by one, and URLs and e-mail
            addresses are put back by the ``attention``.
        lm_weight: weight of a language model's log-probabilities in scores, see
            :class:`~econmt.decoding.search.fusion.ShallowFusion`; needs a language model.
        avoid: phrases that no translation may contain.
        glossary_mode: how sentences whose translations lack terms of a glossary are translated again: "annotate" writes
            the terms into the source, for models trained with ``data.annotate_terms``; "constrain" constrains the
            search; "auto" annotates if the model knows that, and constrains the search if a term still lacks.
        chunk_size: number of lines that are read and sorted by length before any is translated.
        long_lines: treatment of sources of more than ``max_input_length`` tokens: "cut" translates the beginning,
            "skip" gives an empty line.
        continuous: True if beam search with one model replaces finished sentences by waiting ones, on a GPU in CUDA
            graphs (:mod:`econmt.decoding.search.continuous`); None: on a GPU only. Results are the same.

    Raises:
        ValidationError: pydantic's, a ValueError, if a value has another type or is out of range.
    """

    nbest_size: limits.NBestSize = 1
    ensemble_mode: Literal["linear", "log_linear"] = "linear"
    sample: limits.TopTokens | None = None
    top_p: limits.TopShare = 1.0
    temperature: limits.Temperature = 1.0
    seed: limits.Seed = 1
    attention: bool = True
    replace_unk: bool = False
    restore_case: bool = False
    markup: bool = False
    split_sentences: bool = False
    lm_weight: limits.PenaltyWeight = 0.0
    avoid: tuple[str, ...] = ()
    glossary_mode: Literal["auto", "annotate", "constrain"] = "auto"
    chunk_size: Annotated[int, Field(ge=1, le=limits.LINES)] = CHUNK_SIZE
    long_lines: Literal["cut", "skip"] = "cut"
    continuous: bool | None = None

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
