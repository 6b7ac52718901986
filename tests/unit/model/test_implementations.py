"""The implementations that a recipe asks for reach every op, and change nothing but rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from econmt.config.recipe import load_recipe
from econmt.model import Implementations, attention, build_model, cells, decoder, translation
from econmt_ops import linear_cross_entropy
from tests.unit.model.test_translation import PAD, log_probabilities, make_batch, make_config, make_model


def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Notes the implementation and the stash level of every call of an op by the model."""
    calls: list[tuple[str, str, str]] = []

    def noting(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, stash: str = "", **options: Any) -> Any:
            calls.append((name, options["implementation"], stash))
            return op(*args, **{**options, "implementation": "reference"})

        return run

    for module, name in (
        (cells, "bidirectional_lstm"),
        (decoder, "attentional_lstm"),
        (attention, "additive_attention"),
        (translation, "linear_cross_entropy"),
    ):
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    layers = cells.CELLS["lstm"]
    monkeypatch.setattr(layers, "op", noting("lstm", layers.op))
    return calls


@pytest.mark.parametrize("input_feeding", [True, False])
def test_every_op_is_told(monkeypatch: pytest.MonkeyPatch, input_feeding: bool) -> None:
    calls = record(monkeypatch)
    model = make_model(make_config(decoder__input_feeding=input_feeding, dropout=0.3)).train()
    model.loss(*make_batch())
    assert {(name, stash) for _, name, stash in calls} == {("auto", "")}
    calls.clear()
    given = Implementations("compiled", "recompute", "auto", "reference", "cells")
    model.loss(*make_batch(), implementations=given)
    told = {
        ("bidirectional_lstm", "compiled", "cells"),
        ("lstm", "compiled", "cells"),
        ("linear_cross_entropy", "reference", ""),
    }
    if input_feeding:
        assert set(calls) == told | {("attentional_lstm", "recompute", "cells")}
    else:
        assert set(calls) == told | {("lstm", "recompute", "cells"), ("additive_attention", "auto", "")}


@pytest.mark.parametrize(
    ("encoder", "decoder", "stash", "expected"),
    [
        ("auto", "auto", "auto", ("auto", None)),
        ("recompute", "reference", "cells", ("reference", None)),
        ("reference", "recompute", "outputs", ("recompute", "outputs")),
        ("recompute", "compiled", "auto", ("compiled", None)),
    ],
)
def test_the_reference_is_told_no_stash_level(
    encoder: str, decoder: str, stash: str, expected: tuple[str, str | None]
) -> None:
    arguments = Implementations(encoder, decoder, stash=stash).recurrent("decoder")
    assert (arguments["implementation"], arguments.get("stash")) == expected


def test_a_recipe_says_which() -> None:
    changes = ["ops={decoder: recompute, encoder: reference, output: compiled, stash: cells}"]
    model = build_model(load_recipe("quickstart", changes), 20, 20)
    assert model.implementations == Implementations("reference", "recompute", "auto", "compiled", "cells")
    assert build_model(load_recipe("quickstart"), 20, 20).implementations == Implementations()


def test_loss_is_the_cross_entropy_of_what_is_no_padding() -> None:
    model, (source, lengths, target_input, target_output) = make_model(make_config()), make_batch()
    hidden = model(source, lengths, target_input)
    of_words = log_probabilities(model, hidden)
    expected = -sum(
        of_words[row, position, word]
        for row, words in enumerate(target_output.tolist())
        for position, word in enumerate(words)
        if word != PAD
    )
    loss = model.loss(*make_batch())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(float(torch.as_tensor(expected).detach()), rel=1e-6)
    smoothed = model.loss(*make_batch(), label_smoothing=0.1)
    given = hidden.flatten(0, 1), model.output.weight, target_output.flatten()
    options = {"bias": model.output.bias, "label_smoothing": 0.1, "ignore_index": PAD, "reduction": "sum"}
    direct = linear_cross_entropy(*given, **options)
    assert smoothed.item() == pytest.approx(direct.item(), rel=1e-6)
