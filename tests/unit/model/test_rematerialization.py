"""Rematerialised tensors are made again in the backward pass, with the same gradients."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from econmt.model import Implementations, translation
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
