"""Options of a search."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from econmt.config import limits, recipe
from econmt.config.lengths import BrevityPenaltyType, check_penalty


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class SearchOptions:
    """Options of a search; those up to ``block_ngram_repeat`` are of ``recipe.Decoding``.

    Attributes:
        beam_size: hypotheses kept at each position; 1 is greedy search.
        length_penalty_alpha: scores are divided by ((beta + length) / (beta + 1)) ** alpha, length counting EOS.
        length_penalty_beta: see ``length_penalty_alpha``.
        max_output_factor: longest output: this times the source length, plus ``MAX_OUTPUT_EXTRA``.
        brevity_penalty_type, brevity_penalty_weight, brevity_penalty_constant_length_ratio: see the next.
        coverage_penalty_weight: see :class:`~econmt.decoding.search.penalties.Penalties`; 0: none.
        beam_search_stop: "all": when nothing better can come; "first": when one hypothesis has ended.
        beam_prune: a growing hypothesis whose log-probability divided by its length penalty is so far below the best
            score of those that have ended is given up; 0: none is.
        block_ngram_repeat: no hypothesis holds so many tokens in a row twice; 0: it may.
        nbest_size: hypotheses returned for a sentence, at most ``beam_size`` of them in beam search.
        ensemble_mode: average the models' probabilities (linear) or their log-probabilities (log_linear).
        sample: None for beam search; 0 draws from the whole distribution, k from its k most probable tokens.
        temperature: log-probabilities are divided by it before a token is drawn.
        seed: of the draws; a sentence's draws depend on this and its number alone.
        attention: whether hypotheses carry their attention.
        replace_unk: whether an unknown token is written as the source has what it sees most; needs ``attention``.
        restore_case: whether a line in capitals is translated as if it were not, and its translation put in capitals.
        beam_groups: groups into which the beam is divided, see :mod:`econmt.decoding.search.diversity`; 1: none.
        diversity_strength: what a token costs that a group before has chosen.
        markup: whether tags and placeholders are taken out of a line and put into its translation, see
            :mod:`econmt.decoding.markup`; needs ``attention``.

    Raises:
        ValidationError: pydantic's, a ValueError, if a value is of another type or out of range.
    """

    beam_size: limits.BeamSize = 5
    length_penalty_alpha: limits.LengthPenaltyAlpha = 1.0
    length_penalty_beta: limits.LengthPenaltyBeta = 0.0
    max_output_factor: limits.OutputFactor = 2.0
    brevity_penalty_type: BrevityPenaltyType = "constant"
    brevity_penalty_weight: limits.PenaltyWeight = 0.0
    brevity_penalty_constant_length_ratio: limits.OutputFactor = 1.0
    coverage_penalty_weight: limits.PenaltyWeight = 0.0
    beam_search_stop: Literal["all", "first"] = "all"
    beam_prune: limits.PenaltyWeight = 0.0
    block_ngram_repeat: limits.NGram = 0
    nbest_size: limits.NBestSize = 1
    ensemble_mode: Literal["linear", "log_linear"] = "linear"
    sample: limits.TopTokens | None = None
    temperature: limits.Temperature = 1.0
    seed: limits.Seed = 1
    attention: bool = True
    replace_unk: bool = False
    restore_case: bool = False
    beam_groups: limits.BeamSize = 1
    diversity_strength: limits.PenaltyWeight = 0.5
    markup: bool = False

    def __post_init__(self) -> None:
        check_penalty(self.brevity_penalty_type, self.brevity_penalty_weight)
        if self.sample is None and self.nbest_size > self.beam_size:
            raise ValueError(f"nbest_size {self.nbest_size} must not exceed beam_size {self.beam_size}")
        if self.sample is not None and self.block_ngram_repeat:
            raise ValueError("block_ngram_repeat cannot be combined with sample; remove one of them")
        if not self.attention:
            for name in ("replace_unk", "markup"):
                if getattr(self, name):
                    raise ValueError(f"{name} reads the attention, which is left out")
        if self.beam_groups > 1:
            if self.sample is not None or self.block_ngram_repeat:
                other = "sample" if self.sample is not None else "block_ngram_repeat"
                raise ValueError(f"beam_groups cannot be combined with {other}; remove one of them")
            if self.beam_size % self.beam_groups:
                raise ValueError(
                    f"beam_groups {self.beam_groups} must divide beam_size {self.beam_size} without remainder"
                )

    @classmethod
    def from_recipe(cls, decoding: recipe.Decoding) -> SearchOptions:
        """The search that a recipe's ``decoding`` section describes."""
        return cls(**decoding.model_dump(exclude={"batch_size", "max_input_length"}))

    @property
    def penalizes(self) -> bool:
        """True if scores include more than log-probabilities divided by the length penalty."""
        return self.punishes_brevity or self.coverage_penalty_weight > 0.0

    @property
    def punishes_brevity(self) -> bool:
        """True if there is a brevity penalty."""
        return self.brevity_penalty_type != "none" and self.brevity_penalty_weight > 0.0

    @property
    def is_plain(self) -> bool:
        """True if a search uses only log-probabilities and lengths, and ends when no better hypothesis can come."""
        return not (self.penalizes or self.beam_search_stop == "first" or self.beam_prune or self.is_steered)

    @property
    def is_steered(self) -> bool:
        """True if a search uses more than scores even for sentences without constraints."""
        return self.block_ngram_repeat > 0 or self.beam_groups > 1
