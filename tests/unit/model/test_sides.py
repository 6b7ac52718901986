"""Embeddings of two widths, dropout by side, and dropout of whole tokens."""

from __future__ import annotations

import re

import pytest
import torch

from econmt.cli.info import _widths
from econmt.config import recipe
from econmt.config.recipe import load_recipe
from econmt.errors import InputError
from econmt.model import IncrementalModel, TranslationModel
from econmt.model.layers import EmbeddingDropout
from econmt_ops.products.dropout import RowsSeed
from tests.unit.model.test_translation import make_batch, make_config, make_model, sum_of_losses


@pytest.mark.parametrize("tying", ["none", "trg_softmax"])
@pytest.mark.parametrize("feeding", [True, False])
@pytest.mark.parametrize("normalized", [True, False])
def test_two_widths(tying: str, feeding: bool, normalized: bool) -> None:
    if normalized and not feeding:
        return
    options = {"target_embedding": 10, "weight_tying": tying, "layer_normalization": normalized}
    model = make_model(make_config(decoder__input_feeding=feeding, **options))
    assert model.source_embedding.weight.shape[1] == 6
    assert model.target_embedding.weight.shape[1] == 10
    assert model.output.in_features == (10 if tying != "none" else 8)
    source, lengths, target_input, _ = make_batch()
    expected = torch.log_softmax(model(source, lengths, target_input) @ model.output.weight.T, -1)
    model.output.bias.data.zero_()
    incremental = IncrementalModel(model)
    state = incremental.encode(source, lengths)
    for step in range(target_input.shape[1]):
        found, _, state = incremental.step(target_input[:, step], state)
        torch.testing.assert_close(found, expected[:, step], rtol=1e-10, atol=1e-12)
    sum_of_losses(model).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_equal_widths_are_those_of_one_key() -> None:
    one = make_model(make_config(embedding=7))
    two = make_model(make_config(source_embedding=7, target_embedding=7))
    assert torch.equal(sum_of_losses(one), sum_of_losses(two))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["model.weight_tying=src_trg", "model.source_embedding=5"],
            "weight_tying src_trg shares the embeddings, whose widths are 5 and 64; make source_embedding and",
        ),
        (
            [
                "data.source_factors=[pos]",
                "model.source_factors_combine=sum",
                "model.source_embedding=5",
                "model.source_factors_num_embed=[64]",
            ],
            "each width must equal the width of source embeddings, 5",
        ),
    ],
)
def test_widths_that_do_not_fit(keys: list[str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load_recipe("quickstart", ["model.embedding=64", *keys])


def test_info_names_both_widths() -> None:
    assert _widths({"embedding": 4, "source_embedding": 6, "target_embedding": None}) == "6 source, 4 target"
    assert _widths({"embedding": 4, "source_embedding": 4, "target_embedding": None}) == "4"
    assert _widths({"embedding": 4}) == "4"


def dropping(**values: float) -> TranslationModel:
    return make_model(make_config(dropout=values)).train()


def test_dropout_by_side() -> None:
    values = recipe.Dropout(embedding=0.1, layers=0.2, target_embedding=0.0, encoder_layers=0.4)
    assert values.embeddings == (0.1, 0.0)
    assert values.stacks == (0.4, 0.2)
    model = dropping(embedding=0.1, layers=0.2, target_embedding=0.0, encoder_layers=0.4, source_words=0.3)
    modules = model.source_dropout, model.target_dropout, model.encoder.dropout, model.decoder.dropout
    assert [module.probability for module in modules] == [0.1, 0.0, 0.4, 0.2]
    assert (model.source_dropout.words, model.target_dropout.words) == (0.3, 0.0)
    assert [module.drops for module in modules] == [True, False, True, True]


@pytest.mark.parametrize("side", ["source", "target"])
def test_each_side_alone_drops(side: str) -> None:
    """What is dropped changes with the random state; the other side and all else do not."""
    for name in (f"{side}_words", f"{side}_embedding"):
        model = dropping(**{name: 0.5})
        source, lengths, _, _ = make_batch()
        torch.manual_seed(1)
        encoded = [model.encode(source, lengths).memory.values for _ in range(2)]
        assert torch.equal(*encoded) == (side == "target")
        losses = [sum_of_losses(model) for _ in range(3)]
        assert len({loss.item() for loss in losses}) == 3
        torch.manual_seed(5)
        first = sum_of_losses(model)
        torch.manual_seed(5)
        assert torch.equal(sum_of_losses(model), first)
        assert len({sum_of_losses(model.eval()).item() for _ in range(2)}) == 1


def test_whole_tokens_are_dropped() -> None:
    values = torch.rand(40, 30, 8, dtype=torch.float64) + 1.0
    dropout = EmbeddingDropout(0.0, 0.25, variational=False).train()
    torch.manual_seed(3)
    found = dropout(values)
    kept = found[..., 0] != 0.0
    torch.testing.assert_close(found, torch.where(kept[..., None], values / 0.75, 0.0))
    assert kept.double().mean() == pytest.approx(0.75, abs=0.05)
    assert kept.any(0).all()
    assert kept.any(1).all()


@pytest.mark.parametrize("variational", [True, False])
def test_tokens_and_units_are_dropped_independently(variational: bool) -> None:
    values = torch.ones(60, 40, 16, dtype=torch.float64)
    dropout = EmbeddingDropout(0.5, 0.25, variational).train()
    torch.manual_seed(3)
    found = dropout(values)
    kept = found.any(2)
    torch.testing.assert_close(found[found != 0.0].unique(), torch.tensor([1 / (0.75 * 0.5)]).double())
    assert kept.double().mean() == pytest.approx(0.75, abs=0.05)
    for unit in (0, 5):
        assert (found[..., unit] != 0.0)[kept].double().mean() == pytest.approx(0.5, abs=0.15)
    if variational:
        for row in range(3):
            assert len(found[row][kept[row]].unique(dim=0)) == 1


def test_a_part_of_the_rows_drops_what_it_drops_in_the_whole() -> None:
    """As processes that share a batch do; and the mask follows the seed that is given."""
    values = torch.ones(6, 5, 8)
    dropout = EmbeddingDropout(0.3, 0.4, variational=False).train()
    torch.manual_seed(2)
    seed = dropout.draw()
    assert isinstance(seed, int)
    assert torch.equal(dropout(values, seed), dropout(values, seed))
    assert not torch.equal(dropout(values, seed), dropout(values, seed + 1))
    assert torch.equal(dropout(values[2:], RowsSeed(seed, 2)), dropout(values, seed)[2:])
