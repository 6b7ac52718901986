"""Models whose LSTMs are factorised: what they compute, their parameters, and their first values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt.config import recipe
from econmt.model import TranslationModel
from econmt.model.layers import Factors, LSTMLayer
from tests.unit.model.test_translation import make_batch, make_config, make_model

RANKS = {"encoder__rank": 2, "decoder__rank": 3}
KINDS = pytest.mark.parametrize(
    "options",
    [
        {"encoder__bidirectional": "bottom"},
        {"encoder__bidirectional": "all", "decoder__input_feeding": False},
        {"encoder__bidirectional": "none", "encoder__residual": True, "decoder__residual": True},
    ],
    ids=["fed", "not-fed", "residual"],
)


def multiplied_out(thin: TranslationModel, config: recipe.Model) -> TranslationModel:
    """The same model with whole matrices."""
    whole = make_model(config, seed=2)
    tensors = thin.state_dict()
    for name in [name for name in tensors if name.endswith(".left")]:
        left, right = tensors.pop(name), tensors.pop(name.replace(".left", ".right"))
        tensors[name.removesuffix(".left")] = left @ right
    whole.load_state_dict(tensors)
    return whole


def gradients(model: TranslationModel) -> dict[str, Tensor]:
    model.zero_grad()
    model.loss(*make_batch()).backward()
    return {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


@KINDS
def test_equals_the_model_with_the_factors_multiplied_out(options: dict[str, object]) -> None:
    thin = make_model(make_config(**options, **RANKS))
    whole = multiplied_out(thin, make_config(**options))
    source, lengths, target_input, target_output = make_batch()
    loss, expected = (model.loss(source, lengths, target_input, target_output) for model in (thin, whole))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    found, full = gradients(thin), gradients(whole)
    for name, gradient in full.items():
        if name in found:
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
            continue
        left, right = (dict(thin.named_parameters())[f"{name}.{part}"] for part in ("left", "right"))
        torch.testing.assert_close(found[f"{name}.left"], gradient @ right.t(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found[f"{name}.right"], left.t() @ gradient, rtol=1e-9, atol=1e-12)


def test_parameters_have_the_names_and_shapes_of_factors() -> None:
    thin, whole = make_model(make_config(**RANKS)), make_model(make_config())
    shapes = {name: tuple(part.shape) for name, part in thin.named_parameters()}
    assert shapes["encoder.forward_layers.0.hidden.left"] == (16, 2)
    assert shapes["encoder.forward_layers.0.hidden.right"] == (2, 4)
    assert shapes["decoder.layers.0.input.left"] == (32, 3)
    assert shapes["decoder.layers.0.input.right"] == (3, 6 + 8)
    for name, part in whole.named_parameters():
        factors = [shapes.get(f"{name}.{end}") for end in ("left", "right")]
        if None in factors:
            assert shapes[name] == tuple(part.shape)
        else:
            (rows, rank), (other, columns) = factors
            assert (rows, columns, rank) == (*part.shape, other)
    layers = thin.parameter_layers()
    assert layers["encoder.upper_layers.0.hidden.right"] == "encoder"
    assert layers["decoder.layers.1.input.left"] == "decoder"


@pytest.mark.parametrize("weights", ["uniform", "xavier"])
def test_first_products_have_the_variance_of_whole_matrices(weights: str) -> None:
    init = recipe.Initialization.model_validate({"weights": weights, "scale": 0.3, "forget_bias": 1.5})
    torch.manual_seed(3)
    whole, thin = LSTMLayer(80, 120), LSTMLayer(80, 120, rank=40)
    whole.initialize(init)
    thin.initialize(init)
    for full, factors in ((whole.input, thin.input), (whole.hidden, thin.hidden)):
        assert isinstance(full, Tensor)
        assert isinstance(factors, Factors)
        product = factors.left @ factors.right
        assert product.shape == full.shape
        assert float(product.var()) == pytest.approx(float(full.var()), rel=0.1)
        assert float(factors.left.var()) == pytest.approx(float(factors.right.var()), rel=0.1)
    assert thin.bias[120:240].eq(1.5).all()
    assert thin.bias[:120].eq(0.0).all()
