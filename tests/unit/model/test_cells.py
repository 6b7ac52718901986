"""Models of every cell and with factorised matrices: what any encoder and any decoder must do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from econmt.config import model, recipe
from econmt.config.stacks import CELLS as RULES
from econmt.config.stacks import RecurrentStack
from econmt.data.batching.pair_flops import pair_flops
from econmt.model import TranslationModel
from econmt.model.cells import CELLS
from econmt.model.layers import Factors, LSTMLayer, RecurrentLayer
from tests.unit.model.test_translation import (
    VOCABULARY,
    check_rows_and_steps,
    make_batch,
    make_config,
    make_model,
)

OTHERS = [name for name in CELLS if name != "lstm"]
each_cell = pytest.mark.parametrize("cell", OTHERS)


def config_of(cell: str, layers: int = 2, residual: bool = True, **options: object) -> model.Model:
    return make_config(
        encoder={"cell": cell, "size": 8, "layers": 3, "bidirectional": "bottom", "residual": residual},
        decoder={"cell": cell, "size": 8, "layers": layers, "input_feeding": False, "residual": residual},
        **options,
    )


def test_recipes_and_models_know_the_same_cells_and_parameters_have_the_names_and_shapes_of_factors() -> None:
    assert set(CELLS) == set(RULES)
    kinds = RecurrentStack.model_fields["cell"].annotation
    assert set(kinds.__args__) == set(CELLS)  # type: ignore[union-attr]
    thin = make_model(make_config(**RANKS))
    shapes = {name: tuple(part.shape) for name, part in thin.named_parameters()}
    assert shapes["encoder.forward_layers.0.hidden.left"] == (16, 2)
    assert shapes["encoder.forward_layers.0.hidden.right"] == (2, 4)
    assert shapes["decoder.layers.0.input.left"] == (32, 3)
    assert shapes["decoder.layers.0.input.right"] == (3, 6 + 8)
    layers = thin.parameter_layers()
    assert layers["encoder.upper_layers.0.hidden.right"] == "encoder"
    assert layers["decoder.layers.1.input.left"] == "decoder"


@each_cell
def test_an_implementation_that_a_cell_lacks_is_replaced_by_recompute(cell: str) -> None:
    options = {"implementation": "recompute", "stash": "gates"}
    for name, expected in (("auto", "auto"), ("recompute", "recompute"), ("cudnn", "recompute")):
        how = CELLS[cell].how({**options, "implementation": name})
        assert how == {**options, "implementation": expected}


@each_cell
@pytest.mark.parametrize(
    ("layers", "state_init", "encoder"),
    [
        (1, "last", {}),
        (2, "zero", {}),
        (2, "last", {"bidirectional": "none"}),
        (2, "last", {"bidirectional": "none", "reverse_input": True}),
    ],
)
def test_rows_and_steps(cell: str, layers: int, state_init: str, encoder: dict[str, Any]) -> None:
    """Other sentences and padding change nothing, and steps of a search equal teacher forcing."""
    config = config_of(cell, layers)
    changes = {
        "encoder": config.encoder.model_copy(update=encoder),
        "decoder": config.decoder.model_copy(update={"state_init": state_init}),
    }
    state = check_rows_and_steps(make_model(config.model_copy(update=changes)))[1]
    # Rows go on from wherever they are put.
    turned = state.select(torch.tensor([2, 0]), torch.tensor([2, 0]), 1)
    for kept, whole in zip(turned.memory, state.memory, strict=True):
        assert torch.equal(kept, whole[[2, 0]])


@pytest.mark.parametrize(("bidirectional", "size"), [("none", 3), ("bottom", 6)])
def test_an_sru_of_three_quarters_of_what_it_reads_has_its_size(bidirectional: str, size: int) -> None:
    encoder = {"cell": "sru", "size": size, "layers": 1, "bidirectional": bidirectional}
    check_rows_and_steps(make_model(make_config(embedding=4, encoder=encoder)))


@each_cell
def test_first_values(cell: str) -> None:
    config = config_of(cell, initialization={"weights": "uniform", "scale": 0.25, "forget_bias": 1.5})
    layer = make_model(config).encoder.upper_layers[0]
    assert isinstance(layer, RecurrentLayer)
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 2:
            assert 0.2 < float(parameter.detach().abs().max()) <= 0.25
        elif name.endswith("gain"):
            assert bool((parameter == 1.0).all())
        elif name in (("shift",) if cell == "lnglstm" else ("bias", "surrogate_bias")):
            gates = parameter.view(-1, 8)
            assert bool((gates[1] == 1.5).all())
            assert not gates[[0, *range(2, len(gates))]].any()
        else:
            assert name in ("cell_bias", "hidden_bias", "bias")
            assert not parameter.any()


def test_work_of_a_pair_is_that_of_the_cells() -> None:
    # Two layers of width 8 that read 6 and 8 values; 2 x 8 x 5 for the keys.
    products = {
        "lstm": 4 * 8 * (6 + 8 + 8 + 8),
        "lnlstm": 4 * 8 * (6 + 8 + 8 + 8),
        "gru": 3 * 8 * (6 + 8 + 8 + 8),
        "sru": 4 * 8 * 6 + 3 * 8 * 8,
        "ssru": 2 * 8 * (6 + 8),
        "lnglstm": 4 * 8 * (6 + 8 + 8 + 8),
        "qrnn": 3 * 8 * (6 + 8),
        "qrnn2": 3 * 8 * 2 * (6 + 8),
        "min_gru": 2 * 8 * (6 + 8),
        "min_lstm": 3 * 8 * (6 + 8),
        "gilr_lstm": 8 * (6 * 6 + 4 * 8) + 8 * (6 * 8 + 4 * 8),
    }
    for cell, count in products.items():
        config = make_config(encoder__cell=cell, encoder__bidirectional="none")
        assert pair_flops(config, VOCABULARY).source == 2 * count + 2 * 8 * 5


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


@pytest.mark.parametrize("weights", ["uniform", "xavier", "torch"])
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
    assert thin.bias[120:240].eq(1.5).all() or weights == "torch"
    assert thin.bias[:120].eq(0.0).all() or weights == "torch"
