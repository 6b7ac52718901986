"""Layers of every kind; rematerialised tensors are made again in the backward pass, with the same gradients."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from econmt.model import Implementations, translation
from econmt.model.layers import Embedding, give_sparse_gradients
from econmt.model.rematerialization import rematerialized
from tests.unit.model.test_translation import make_config, make_model

knows_hooks = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="this PyTorch does not tell which hooks are in force",
)


def made(count: list[int]) -> Tensor:
    count.append(1)
    return torch.arange(12.0, dtype=torch.float64).view(3, 4).sin()


@knows_hooks
@pytest.mark.parametrize("view", ["whole", "transposed", "flat"])
def test_the_tensor_is_freed_and_made_again(view: str) -> None:
    calls: list[int] = []
    weight = torch.linspace(1.0, 2.0, 12, dtype=torch.float64).requires_grad_()
    tensor = made(calls)
    reference = weakref.ref(tensor)
    expected = tensor.clone()
    with rematerialized(tensor, lambda: made(calls)):
        read = {"whole": tensor, "transposed": tensor.t(), "flat": tensor.view(-1)}[view]
        product = read * weight.view(read.shape)
    del tensor, read
    gc.collect()
    assert reference() is None
    assert len(calls) == 1
    product.sum().backward()
    assert len(calls) == 2
    wanted = {"whole": expected, "transposed": expected.t(), "flat": expected}[view]
    torch.testing.assert_close(weight.grad, wanted.reshape(-1))


@knows_hooks
def test_other_tensors_are_kept_by_the_hooks_around() -> None:
    kept: list[tuple[int, ...]] = []
    calls: list[int] = []
    tensor = made(calls)
    weight = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    factor = torch.full((3, 4), 2.0, dtype=torch.float64)

    def keep(saved: Tensor) -> Tensor:
        kept.append(tuple(saved.shape))
        return saved

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved * 10.0),
        rematerialized(tensor, lambda: made(calls)),
    ):
        total = (weight * tensor).sum() + (weight * factor).sum() + (weight[:2] * tensor[:2]).sum()
    total.backward()
    assert len(calls) == 2
    # What the hooks around have kept comes back ten times as large; a part of the tensor is kept as it is.
    assert kept == [(3, 4), (2, 4)]
    expected = tensor + 20.0
    expected[:2] += 10.0 * tensor[:2]
    torch.testing.assert_close(weight.grad, expected)


@knows_hooks
def test_a_model_keeps_ids_of_the_source_instead_of_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, gradients = [], []
    for keeps in (False, True):
        model = make_model(make_config()).train()
        lengths = torch.tensor([5, 3])
        ids = torch.tensor([[4, 5, 6, 7, 8], [9, 10, 11, 0, 0]])
        if keeps:
            monkeypatch.setattr(translation, "rematerialized", lambda *_: nullcontext())
        saved: list[tuple[int, ...]] = []

        def keep(part: Tensor, into: list[tuple[int, ...]] = saved) -> Tensor:
            into.append(tuple(part.shape))
            return part

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda part: part):
            how = Implementations.everywhere("recompute", "outputs")
            values = model.encode(ids, lengths, how).memory.values
        values.square().sum().backward()
        shapes.append(saved)
        gradients.append([part.grad for part in model.parameters() if part.grad is not None])
    embedded = (5, 2, 6)
    assert embedded in shapes[1]
    assert embedded not in shapes[0]
    assert len(gradients[0]) == len(gradients[1]) > 5
    assert all(map(torch.equal, *gradients))


def test_an_older_pytorch_keeps_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    calls: list[int] = []
    weight = torch.linspace(1.0, 2.0, 12, dtype=torch.float64).requires_grad_()
    tensor = made(calls)
    with rematerialized(tensor, lambda: made(calls)):
        loss = (tensor.flatten() * weight).sum()
    loss.backward()
    torch.testing.assert_close(weight.grad, tensor.flatten())
    assert len(calls) == 1


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


def test_many_words_get_a_dense_gradient_and_none_is_noted_where_none_is_wanted() -> None:
    for words, layout in ((VOCABULARY // 4, torch.sparse_coo), (VOCABULARY // 4 + 1, torch.strided)):
        embedding = table()
        embedding(torch.arange(words)).sum().backward()
        assert embedding.weight.grad.layout == layout
    embedding = table()
    with torch.no_grad():
        assert not embedding(IDS["one"]).requires_grad
    embedding.weight.requires_grad_(False)
    assert not embedding(IDS["one"]).requires_grad
    assert list(embedding.state_dict()) == ["weight"]
