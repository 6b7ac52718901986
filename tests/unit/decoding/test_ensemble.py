"""Ensembles: the arithmetic, and searching with them."""

from __future__ import annotations

import pytest
import torch

from econmt.decoding.search.ensemble import Ensemble, EnsembleMode, as_one
from tests.unit.decoding.toy import ToyModel, assert_best, search

MODES: list[EnsembleMode] = ["linear", "log_linear"]


@pytest.mark.parametrize("mode", MODES)
def test_search_finds_the_best_of_the_average(mode: EnsembleMode) -> None:
    class Average(ToyModel):
        """The ensemble worked out by hand, token by token."""

        def table(self, sentence: int, prefix: int) -> torch.Tensor:
            first, second = (ToyModel(seed).table(sentence, prefix).double() for seed in (1, 2))
            if mode == "linear":
                return ((first.exp() + second.exp()) / 2).log()
            return ((first + second) / 2).log_softmax(dim=0)

    ensemble = Ensemble([ToyModel(1), ToyModel(2)], mode)
    options = {"beam_size": 200, "length_penalty_alpha": 0.5}
    assert_best(search(ensemble, range(4), **options), Average(), **options)


def test_attention_is_averaged() -> None:
    class Steady(ToyModel):
        def __init__(self, weights: list[float]) -> None:
            super().__init__(0)
            self.weights = torch.tensor(weights)

        def step(self, tokens, state):  # type: ignore[no-untyped-def]
            log_probs, _, state = super().step(tokens, state)
            return log_probs, self.weights.expand(len(tokens), -1), state

    ((best,),) = search(Ensemble([Steady([0.9, 0.1]), Steady([0.5, 0.5])], "linear"), [0], beam_size=1)
    assert best.attention is not None
    assert best.attention[0].tolist() == pytest.approx([0.7, 0.3])


def test_one_model_needs_no_ensemble() -> None:
    model = ToyModel()
    assert as_one([model], "linear") is model
