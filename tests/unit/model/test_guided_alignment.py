"""Guided alignment and weights of pairs against written-out losses; implementations that a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt import model as models
from econmt.config.recipe import load_recipe
from econmt.model import attention, decoder
from econmt.model.guided_alignment import TrainingGuides, alignment_losses
from tests.unit.model.test_translation import make_batch, make_config, make_model

VARIANTS: dict[str, dict[str, Any]] = {
    "additive": {},
    "whole-target": {"decoder__input_feeding": False, "attention__type": "bilinear"},
    "additive-whole-target": {"decoder__input_feeding": False},
    "covered": {"attention__coverage": {"type": "gru"}, "decoder__cell": "gru"},
}
EVERY = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def links() -> Tensor:
    """Tokens with no, one and several source tokens; nothing at padding."""
    found = torch.zeros(3, 4, 5, dtype=torch.int64)
    for place in ((0, 0, 0), (0, 1, 1), (0, 1, 3), (0, 3, 4), (1, 0, 1), (2, 0, 2), (2, 0, 0), (2, 1, 0)):
        found[place] = 1
    return found


def written_out(
    model: models.TranslationModel, weights: Tensor, alignment_weight: float, smoothing: float
) -> Tensor:
    """The losses of each pair, token by token, on the reference's attention."""
    source, lengths, target_input, target_output = make_batch()
    how = models.Implementations()
    _, attention = model._decode(model.encode(source, lengths, how), target_input, how)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(3):
        alone = model.loss(
            source[row : row + 1], lengths[row : row + 1], target_input[row : row + 1],
            target_output[row : row + 1], smoothing, how,
        )  # fmt: skip
        for step in range(4):
            aligned = links()[row, step].nonzero()[:, 0]
            for place in aligned:
                loss = -torch.log(attention[row, step, place] + 1e-6) / len(aligned)
                total = total + weights[row] * alignment_weight * loss
        total = total + weights[row] * alone
    return total


@EVERY
@pytest.mark.parametrize("name", ["reference", "recompute"])
@pytest.mark.parametrize("weights", [None, (0.5, 2.0, 0.0)], ids=["even", "weighted"])
def test_loss_and_gradients(options: dict[str, Any], name: str, weights: tuple[float, ...] | None) -> None:
    how = models.Implementations.everywhere(name, "outputs" if name == "recompute" else "auto")
    factors = torch.tensor(weights or (1.0, 1.0, 1.0), dtype=torch.float64)
    found = []
    for ours in (True, False):
        model = make_model(make_config(**options))
        if ours:
            guides = TrainingGuides(links(), 0.3, None if weights is None else factors)
            loss = model.loss(*make_batch(), 0.1, how, guides=guides)
        else:
            loss = written_out(model, factors, 0.3, 0.1)
        loss.backward()
        found.append((loss.detach().double(), {key: part.grad for key, part in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0.0)
    for key, gradient in found[1][1].items():
        torch.testing.assert_close(found[0][1][key], gradient, rtol=1e-8, atol=1e-9, msg=key)


@EVERY
def test_weights_alone(options: dict[str, Any]) -> None:
    model, batch = make_model(make_config(**options)), make_batch()
    each = [model.loss(*(part[row : row + 1] for part in batch), 0.1).double() for row in range(3)]
    found = model.loss(*batch, 0.1, guides=TrainingGuides(weights=torch.tensor([0.25, 0.0, 3.0])))
    torch.testing.assert_close(found.double(), 0.25 * each[0] + 3.0 * each[2], rtol=1e-6, atol=0.0)


def test_alignment_loss_alone_is_that_of_training() -> None:
    model, batch = make_model(make_config()), make_batch()
    plain = model.loss(*batch).double()
    guided = model.loss(*batch, guides=TrainingGuides(links(), 2.0)).double()
    alone = model.alignment_loss(*batch[:3], links()).double()
    torch.testing.assert_close(guided - plain, 2.0 * alone, rtol=1e-5, atol=0.0)


def test_attention_of_zero_has_a_finite_loss() -> None:
    attention = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]], requires_grad=True)
    aligned = torch.tensor([[[0, 1], [0, 0]]])
    loss = alignment_losses(attention, aligned)
    loss.sum().backward()
    assert loss.item() == pytest.approx(13.8155, abs=1e-3)
    assert attention.grad[0, 0, 1] == pytest.approx(-1e6, rel=1e-3)
    assert attention.grad[0, 1].tolist() == [0.0, 0.0]


def test_a_recipe_says_which_implementations_a_model_has() -> None:
    changes = ["ops={decoder: recompute, encoder: reference, output: compiled, stash: cells}"]
    model = models.build_model(load_recipe("quickstart", changes), 20, 20)
    assert model.implementations == models.Implementations(
        "reference", "recompute", "auto", "compiled", "cells"
    )
    assert models.build_model(load_recipe("quickstart"), 20, 20).implementations == models.Implementations()


def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Notes the implementation and the stash level of every call of an op by the model."""
    calls: list[tuple[str, str, str]] = []

    def noting(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, stash: str = "", **options: Any) -> Any:
            calls.append((name, options["implementation"], stash))
            return op(*args, **{**options, "implementation": "reference"})

        return run

    for module, name in (
        (models.cells, "bidirectional_lstm"),
        (decoder, "attentional_lstm"),
        (attention, "additive_attention"),
        (models.translation, "linear_cross_entropy"),
    ):
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    layers = models.cells.CELLS["lstm"]
    monkeypatch.setattr(layers, "op", noting("lstm", layers.op))
    return calls


@pytest.mark.parametrize("input_feeding", [True, False])
def test_every_op_is_told(monkeypatch: pytest.MonkeyPatch, input_feeding: bool) -> None:
    calls = record(monkeypatch)
    model = make_model(make_config(decoder__input_feeding=input_feeding, dropout=0.3)).train()
    model.loss(*make_batch())
    assert {(name, stash) for _, name, stash in calls} == {("auto", "")}
    calls.clear()
    given = models.Implementations("compiled", "recompute", "auto", "reference", "cells")
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
    arguments = models.Implementations(encoder, decoder, stash=stash).recurrent("decoder")
    assert (arguments["implementation"], arguments.get("stash")) == expected
