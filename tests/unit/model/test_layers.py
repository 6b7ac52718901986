from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from econmt.model.layers import Embedding, give_sparse_gradients

VOCABULARY, WIDTH, PAD = 400, 8, 2


def table(dtype: torch.dtype = torch.float32, sparse: bool = True) -> Embedding:
    torch.manual_seed(1)
    embedding = Embedding(VOCABULARY, WIDTH, padding_idx=PAD, dtype=dtype)
    embedding.weight.data.normal_()
    if sparse:
        give_sparse_gradients(nn.Sequential(embedding))
    return embedding


IDS = {
    "repeated": torch.tensor([[9, 3, 9, 2], [3, 7, 2, 2], [9, 0, 399, 3]]),
    "distinct": torch.tensor([0, 1, 2, 5, 77, 399]),
    "no padding": torch.tensor([5, 4, 5]),
    "one": torch.tensor([[[6]]]),
    "padding": torch.tensor([2, 2]),
    "empty": torch.empty(2, 0, dtype=torch.int64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_the_sparse_gradient_is_that_of_torch(ids: Tensor, dtype: torch.dtype) -> None:
    ours, theirs = table(dtype), nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    found, expected = ours(ids), theirs(ids)
    assert torch.equal(found, expected)
    weight = torch.randn_like(expected)
    for outputs in (found, expected):
        (outputs * weight).sum().backward()
    gradient = ours.weight.grad
    assert gradient.layout == torch.sparse_coo
    assert gradient._indices()[0].tolist() == sorted(set(ids.flatten().tolist()) - {PAD})
    torch.testing.assert_close(gradient.to_dense(), theirs.weight.grad)


def test_gradients_add_up_over_batches() -> None:
    """Sparse to sparse, sparse to dense in place, and of a table that is read in other ways too, as tied ones are."""
    ours, theirs = table(), table(sparse=False)
    first, second = IDS["repeated"], torch.tensor([1, 3, 399])
    for embedding in (ours, theirs):
        for ids in (first, second, second):
            embedding(ids).square().sum().backward()
    assert ours.weight.grad.is_sparse
    assert ours.weight.grad._indices()[0].tolist() == [0, 1, 3, 7, 9, 399]
    torch.testing.assert_close(ours.weight.grad.to_dense(), theirs.weight.grad)
    for embedding in (ours, theirs):
        embedding.weight.grad = None
        hidden = embedding(first).flatten(0, 1) + embedding(second).sum(0)
        (hidden @ embedding.weight.T).square().sum().backward()
        assert not embedding.weight.grad.is_sparse
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    before = ours.weight.grad.data_ptr()
    for embedding in (ours, theirs):
        embedding(second).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    assert ours.weight.grad.data_ptr() == before


def test_the_gradient_shares_no_memory_with_what_made_it() -> None:
    """Else dividing one would change another: an addition hands the same tensor to both of its sides."""
    one, other = table(), table()
    (one(IDS["distinct"]) + other(IDS["distinct"])).square().sum().backward()
    assert one.weight.grad._values().data_ptr() != other.weight.grad._values().data_ptr()


def test_many_words_get_a_dense_gradient() -> None:
    for words, layout in ((VOCABULARY // 4, torch.sparse_coo), (VOCABULARY // 4 + 1, torch.strided)):
        embedding = table()
        embedding(torch.arange(words)).sum().backward()
        assert embedding.weight.grad.layout == layout


def test_nothing_is_noted_where_no_gradient_is_wanted() -> None:
    embedding = table()
    with torch.no_grad():
        assert not embedding(IDS["one"]).requires_grad
    embedding.weight.requires_grad_(False)
    assert not embedding(IDS["one"]).requires_grad
    assert list(embedding.state_dict()) == ["weight"]
