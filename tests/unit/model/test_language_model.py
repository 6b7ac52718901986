"""The language model's parts: states, dropped weights and words, tied tables."""

from __future__ import annotations

import torch
from torch import Tensor

from econmt.config.recipe import LanguageModelSection
from econmt.model.language_model import LanguageModel
from econmt_ops import LSTMWeights

SIZE = 11


def make(**changes: object) -> LanguageModel:
    values = {"embedding": 5, "size": 4, "layers": 2, **changes}
    torch.manual_seed(2)
    return LanguageModel(LanguageModelSection.model_validate(values), SIZE, rows=3).double().train()


def windows(count: int, rows: int = 3, tokens: int = 4) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    ids = torch.randint(4, SIZE, (rows, count * tokens + 1))
    return [
        (ids[:, first : first + tokens], ids[:, first + 1 : first + tokens + 1])
        for first in range(0, count * tokens, tokens)
    ]


def loss_of(model: LanguageModel, window: tuple[Tensor, Tensor], carries: int = 1) -> Tensor:
    rows = torch.arange(1, len(window[0]) + 1)
    return model.loss(*window, rows, torch.full_like(rows, carries))


def test_weight_drop_drops_recurrent_matrices_alone() -> None:
    model = make(dropout={"weights": 0.5}, size=40)

    def weights() -> list[LSTMWeights]:
        seeds = model.draw_seeds()
        return [model.weights_of(number, seeds) for number in range(2)]

    for each, layer in zip(weights(), model.layers, strict=True):
        assert each.input is layer.input
        assert each.bias is layer.bias
        dropped = each.hidden == 0.0
        assert 0.4 < float(dropped.double().mean()) < 0.6
        torch.testing.assert_close(each.hidden[~dropped], 2.0 * layer.hidden[~dropped])
        gradient = torch.autograd.grad(each.hidden.sum(), layer.hidden)[0]
        torch.testing.assert_close(gradient, torch.where(dropped, 0.0, 2.0).double())
    masks = [weights()[0].hidden == 0.0 for _ in range(2)]
    assert not torch.equal(*masks)
    model.eval()
    assert all(torch.equal(w.hidden, layer.hidden) for w, layer in zip(weights(), model.layers, strict=True))


def test_dropped_words_are_dropped_wherever_they_stand() -> None:
    model = make(dropout={"embedding": 0.5})
    ids = torch.tensor([[4, 5, 6, 7, 8, 9, 10], [10, 9, 8, 7, 6, 5, 4]])
    embedded = model.embedding(ids)
    found = model.drop_inputs(embedded, ids, model.draw_seeds())
    gone = (found == 0.0).all(2)
    assert torch.equal(gone[0], gone[1].flip(0))
    assert 0 < int(gone[0].sum()) < 7
    torch.testing.assert_close(found[~gone], 2.0 * embedded[~gone])


def test_the_state_is_carried_without_a_gradient() -> None:
    model = make()
    first, second = windows(2)
    loss_of(model, first, carries=0)
    left = model.carried.clone()
    carried = loss_of(model, second)
    carried.backward()
    whole = torch.cat([first[0], second[0]], 1), torch.cat([first[1], second[1]], 1)
    fresh = make()
    together = loss_of(fresh, whole, carries=0)
    alone = loss_of(make(), first, carries=0)
    torch.testing.assert_close(carried, together - alone)
    assert not torch.equal(loss_of(make(), second, carries=0), carried)
    assert float(left[:, :, 0].abs().sum()) == 0.0
    assert not model.carried.requires_grad


def test_evaluation_leaves_the_state_of_training_alone() -> None:
    model = make()
    first, second = windows(2)
    loss_of(model, first, carries=0)
    before = model.carried.clone()
    model.eval()
    loss_of(model, second, carries=0)
    assert torch.equal(model.carried, before)


def test_padding_rows_and_padding_count_for_nothing() -> None:
    model = make()
    ((inputs, targets),) = windows(1)
    expected = loss_of(model, (inputs, targets), carries=0)
    left = model.carried.clone()
    padded = [torch.cat([each, torch.zeros(2, 4, dtype=torch.int64)]) for each in (inputs, targets)]
    rows = torch.tensor([1, 2, 3, 0, 0])
    found = model.loss(*padded, rows, torch.tensor([0, 0, 0, 0, 0]))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.carried[:, :, 1:4], left[:, :, 1:4])


def test_a_larger_batch_makes_room() -> None:
    model = make()
    (window,) = windows(1, rows=6)
    loss_of(model, window)
    assert model.carried.shape == (2, 2, 7, 4)


def test_tied_tables_of_another_width_have_a_linear_layer_between() -> None:
    model = make(weight_tying="softmax")
    assert model.output.weight is model.embedding.weight
    assert model.readout is not None
    assert make(weight_tying="softmax", embedding=4).readout is None
    assert {*model.parameter_layers().values()} == {"embedding", "decoder", "output"}
