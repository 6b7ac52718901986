from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt.config.recipe import Model
from econmt.model.compression import compress_tensors, factorise, lstm_matrices, rank_for, with_ranks
from tests.unit.model.test_translation import make_batch, make_config, make_model


def matrix(*values: float, rows: int = 9, columns: int = 7) -> Tensor:
    """A matrix of these singular values."""
    torch.manual_seed(4)
    left = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, columns, dtype=torch.float64))[0]
    count = len(values)
    return left[:, :count] @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right[:count]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_factors_are_the_best_and_balanced(rank: int) -> None:
    values = (5.0, 3.0, 1.0)
    whole = matrix(*values)
    left, right, kept = factorise(whole, rank)
    assert (tuple(left.shape), tuple(right.shape)) == ((9, rank), (rank, 7))
    lost = float((whole - left @ right).square().sum())
    assert lost == pytest.approx(sum(value**2 for value in values[rank:]), abs=1e-12)
    assert kept == pytest.approx(1.0 - lost / 35.0)
    torch.testing.assert_close(left.t() @ left, right @ right.t())
    torch.testing.assert_close(left.t() @ left, torch.diag(torch.tensor(values[:rank], dtype=torch.float64)))


def test_factors_have_the_type_of_the_matrix() -> None:
    left, right, _ = factorise(matrix(2.0, 1.0).float(), 2)
    assert (left.dtype, right.dtype) == (torch.float32, torch.float32)


def test_a_matrix_of_zeros_is_kept_whole() -> None:
    left, right, kept = factorise(torch.zeros(4, 3), 2)
    assert kept == 1.0
    assert left.eq(0).all()
    assert right.eq(0).all()


@pytest.mark.parametrize(
    ("energy", "rank"), [(0.1, 1), (25 / 35, 1), (0.8, 2), (34 / 35, 2), (0.99, 3), (1.0, 3)]
)
def test_the_smallest_rank_that_keeps_a_share(energy: float, rank: int) -> None:
    assert rank_for(iter([matrix(5.0, 3.0, 1.0)]), energy) == rank
    # Of several matrices the one that needs most decides.
    assert rank_for(iter([matrix(5.0, 3.0, 1.0), matrix(1.0, 1.0, 1.0, 1.0)]), 0.9) == 4


def test_a_model_that_began_orthogonal_may_have_ranks() -> None:
    config = Model.model_validate({"initialization": {"rnn_h2h": "orthogonal_stacked"}})
    assert with_ranks(config, {"decoder": 4}).decoder.rank == 4


def test_names_are_those_of_lstm_layers() -> None:
    tensors = dict(make_model(make_config(encoder__layers=2)).named_parameters())
    assert lstm_matrices(tensors, "encoder") == [
        f"encoder.{layer}.0.{end}"
        for layer in ("forward_layers", "backward_layers", "upper_layers")
        for end in ("input", "hidden")
    ]
    assert lstm_matrices(tensors, "decoder") == [
        f"decoder.layers.{layer}.{end}" for layer in (0, 1) for end in ("input", "hidden")
    ]


def test_a_compressed_model_has_the_parameters_of_its_recipe_and_loses_nothing_that_it_can_keep() -> None:
    config = make_config()
    whole = make_model(config)
    with torch.no_grad():
        for name, part in whole.named_parameters():
            if name in lstm_matrices({name: part}, "encoder") + lstm_matrices({name: part}, "decoder"):
                part.copy_(torch.randn(len(part), 3).double() @ torch.randn(3, part.shape[1]).double())
    tensors = {name: part.detach() for name, part in whole.named_parameters()}
    ranks = {"encoder": 3, "decoder": 4}
    made, report = compress_tensors(tensors, ranks)
    smaller = with_ranks(config, ranks)
    assert (smaller.encoder.rank, smaller.decoder.rank) == (3, 4)
    thin = make_model(smaller, seed=5)
    assert {name: part.shape for name, part in thin.named_parameters()} == {
        name: part.shape for name, part in made.items()
    }
    thin.load_state_dict(made)
    with torch.no_grad():
        losses = [
            float(model(*make_batch()[:3]).sum()) for model in (whole, thin, make_model(smaller, seed=5))
        ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-9)
    assert abs(losses[2] - losses[0]) > 1e-2
    assert sum(part.numel() for part in tensors.values()) - sum(
        part.numel() for part in made.values()
    ) == sum(entry.before - entry.after for entry in report)
    (entry,) = (entry for entry in report if entry.name == "decoder.layers.0.input")
    assert (entry.rows, entry.columns, entry.rank) == (32, 14, 4)
    assert entry.kept == pytest.approx(1.0)
    kept_by_part = {name for name in tensors if name in made}
    assert not any(name.endswith((".input", ".hidden")) for name in kept_by_part)
    only, _ = compress_tensors(tensors, {"decoder": 4})
    assert "encoder.upper_layers.0.input" in only
