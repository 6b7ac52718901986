"""The formula of a pair's work against the operations that PyTorch's own counter sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from econmt.config.recipe import load_recipe
from econmt.data.batching.pair_flops import PairFlops, pair_flops
from econmt.model import Implementations, build_model
from econmt_memory.measure.flops import flops_formula

MODELS = {
    "input feeding": (),
    "deep": (
        "model.encoder.layers=3",
        "model.decoder.layers=2",
        "model.encoder.size=96",
        "model.weight_tying=none",
    ),
    "all layers both ways": ("model.encoder.layers=2", "model.encoder.bidirectional=all"),
    "one way": ("model.encoder.layers=2", "model.encoder.bidirectional=none"),
    "whole target": ("model.decoder.input_feeding=false", "model.decoder.layers=2"),
    "low rank": ("model.encoder.rank=7", "model.decoder.rank=5", "model.decoder.layers=2"),
    "dot": ("model.attention.type=dot",),
    "bilinear": ("model.attention.type=bilinear", "model.encoder.size=96"),
}
REFERENCE = Implementations.everywhere("reference")
VOCABULARY = 300


class Counter(TorchDispatchMode):
    """Adds up the operations of everything that runs inside."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        formula = flops_formula(func)
        self.total += formula(*args, **(kwargs or {}), out_val=result) if formula else 0
        return result


@pytest.mark.parametrize("name", MODELS)
def test_the_formula_is_what_is_counted(name: str) -> None:
    recipe = load_recipe("quickstart", MODELS[name])
    model = build_model(recipe, VOCABULARY, VOCABULARY)
    model.train()
    rows = 3
    work = pair_flops(recipe.model, VOCABULARY)

    def counted(source: int, target: int) -> float:
        ids = torch.ones(rows, source, dtype=torch.int64)
        words = torch.ones(rows, target, dtype=torch.int64)
        with Counter() as counter:
            model.loss(ids, torch.full((rows,), source), words, words, implementations=REFERENCE)
        return counter.total / rows

    sizes = (10, 10), (20, 10), (10, 20), (20, 20)
    both, longer_source, longer_target, longer = (counted(*each) for each in sizes)
    pair = (longer - longer_source - longer_target + both) / 100
    assert pair == work.pair
    assert (longer_target - both) / 10 - 10 * pair == work.target
    # PyTorch's LSTM is shown a few more inputs, which shut the gates at padding.
    assert 1.0 <= ((longer_source - both) / 10 - 10 * pair) / work.source < 1.07
    # The decoder's first state is made once a sentence, and is not in the formula.
    formula = int(work.of(np.array([50]), np.array([50]))[0])
    assert counted(50, 50) == pytest.approx(formula, rel=0.03)


def test_work_of_pairs() -> None:
    found = PairFlops(2, 3, 5).of(np.array([[1], [4]]), np.array([1, 10]))
    assert found.tolist() == [[10, 82], [31, 238]]
    assert found.dtype == np.int64


def test_scaled_numbers_have_the_same_ratios() -> None:
    work = PairFlops(7_864_320, 200_250_624, 2048)
    small = work.scaled()
    assert sum(small) < 1 << 21
    assert small.target / small.source == pytest.approx(work.target / work.source, rel=1e-3)
    assert small.pair / small.source == pytest.approx(work.pair / work.source, rel=0.1)
    assert PairFlops(3, 4, 0).scaled() == PairFlops(3, 4, 0)
